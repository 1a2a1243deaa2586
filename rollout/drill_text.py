"""Lay out a prompt, a sample or a token for a terminal of 100 columns."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final

from rollout.drill import Alternative, PromptView, SampleLine, SampleView, TokenLine
from rollout.terminal_text import WIDTH, bar, fit, fit_end, pad, printable

_SHOWN_TOKENS: Final = 400
_SHOWN_IDS: Final = 24
_TEXT: Final = 18


def format_prompt(view: PromptView) -> str:
    """Lay out one prompt and its samples, a line each."""
    lines = [
        fit(f"prompt     {printable(view.prompt_id)} (key {view.prompt_key[:16]})", WIDTH),
        *_texts("text", view.prompt_text, view.prompt_token_ids),
    ]
    if view.rejected is not None:
        why = f"{view.rejected.reason}: {view.rejected.detail}"
        lines.append(fit(f"set aside  at {view.rejected.stage}: {printable(why)}", WIDTH))
    if view.samples:
        lines += ["", _SAMPLE_HEAD, *(_sample_line(sample) for sample in view.samples)]
    return "\n".join(line.rstrip() for line in lines)


def format_sample(view: SampleView) -> str:
    """Lay out one rollout: its facts, and a line for each token."""
    lines = [*_facts(view), "", _TOKEN_HEAD]
    lines += [_token_line(token) for token in view.tokens[:_SHOWN_TOKENS]]
    left = len(view.tokens) - _SHOWN_TOKENS
    if left > 0:
        lines.append(f"... and {left:,} more tokens: --json has all, --token shows one")
    return "\n".join(line.rstrip() for line in lines)


def format_token(view: SampleView) -> str:
    """Lay out one token: where it stands, and what else could have been drawn."""
    (token,) = view.tokens
    lines = [*_facts(view), "", f"token {token.position} of {view.num_tokens}"]
    if view.before is not None and view.after is not None and token.text is not None:
        before, after = _quoted(view.before)[1:-1], _quoted(view.after)[1:-1]
        lines.append("  ..." + fit_end(before, 36) + " >>" + _quoted(token.text)[1:-1] + "<< ")
        lines[-1] = fit(lines[-1] + fit(after, 36), WIDTH)
    facts = [f"id {token.id}", f"log q {_number(token.logprob)}"]
    if token.logprob is not None:
        facts.append(f"q {math.exp(token.logprob):.4g}")
    if token.support_size is not None:
        facts.append(f"{token.support_size:,} ids recorded ({view.support_kind})")
        facts.append(f"rank {token.rank}" if token.rank else "not among them: it is in the tail")
    else:
        facts.append("no support recorded")
    if token.tail_mass is not None:
        facts.append(f"tail mass {token.tail_mass:.3g}")
    lines += ["  " + ", ".join(facts), ""]
    shown = list(enumerate(token.alternatives[:_SHOWN_IDS], start=1))
    if token.rank is not None and token.rank > _SHOWN_IDS:
        shown.append((token.rank, token.alternatives[token.rank - 1]))
    if shown:
        lines.append(f"{'rank':>8} {'id':>8}  {pad('text', _TEXT)} {'log q':>9} {'q':>9}")
    lines += [_alternative(rank, item) for rank, item in shown]
    rest = token.alternatives[_SHOWN_IDS:]
    if rest:
        mass = sum(math.exp(item.logprob) for item in rest)
        lines.append(f"    {len(rest):,} ids after rank {_SHOWN_IDS} hold {mass:.3g}: --json")
    return "\n".join(line.rstrip() for line in lines)


_SAMPLE_HEAD = (
    f"{'sample':>6} {'tokens':>7} {'finish':<8} {'reward':>8} {'advant.':>8} {'mean log q':>10} "
    f"{'support':>8} {'max tail':>8}  text"
)
_TOKEN_HEAD = (
    f"{'pos':>6} {'id':>8}  {'text':<{_TEXT}} {'log q':>9} {'ids':>7} {'tail':>8} "
    f"{'q of it':<11}next best"
)


def _sample_line(sample: SampleLine) -> str:
    head = f"{sample.sample_index:>6} "
    if sample.status != "committed":
        return fit(f"{head}{sample.status} {printable(sample.why or '')}", WIDTH)
    line = (
        f"{head}{sample.num_tokens:>7} {(sample.finish_reason or '-')[:8]:<8} "
        f"{_reward(sample):>8} {_number(sample.advantage):>8} "
        f"{_number(sample.mean_logprob):>10} {_number(sample.mean_support):>8} "
        f"{_number(sample.largest_tail):>8}  "
    )
    if sample.nonfinite_logprobs:
        line += f"{sample.nonfinite_logprobs} NaN or infinite log q! "
    return fit(line + (_quoted(sample.text) if sample.text is not None else ""), WIDTH)


def _facts(view: SampleView) -> list[str]:
    finish = view.finish_reason or "-"
    if view.stop_reason is not None:
        finish += f" ({view.stop_reason})"
    step = "" if view.policy_step is None else f", policy step {view.policy_step}"
    facts = f"{view.num_tokens} tokens, finish {finish}, temperature {view.temperature:g}{step}"
    return [
        fit(f"prompt     {printable(view.prompt_id)} sample {view.sample_index}", WIDTH),
        fit(f"rollout    {view.rollout_id} in {view.file}", WIDTH),
        fit(f"facts      {facts}", WIDTH),
        f"reward     {_reward(view)}, advantage {_number(view.advantage)}",
        *_texts("prompt", view.prompt_text, view.prompt_token_ids),
        *_texts("sampled", view.text, None),
        *([] if view.metadata is None else [fit(f"metadata   {printable(view.metadata)}", WIDTH)]),
    ]


def _texts(label: str, text: str | None, ids: Sequence[int] | None) -> list[str]:
    if text is not None:
        return [fit(f"{label:<11}{_quoted(text)}", WIDTH)]
    if ids is not None:
        return [fit(f"{label:<11}ids {' '.join(map(str, ids[:40]))}", WIDTH)]
    return []


def _token_line(token: TokenLine) -> str:
    others = [item for item in token.alternatives if not item.sampled][:2]
    best = "  ".join(f"{_name(item)} {math.exp(item.logprob):.2g}" for item in others)
    share = 0.0 if token.logprob is None else math.exp(token.logprob)
    text = "" if token.text is None else _quoted(token.text)
    size = "-" if token.support_size is None else f"{token.support_size:,}"
    tail = "-" if token.tail_mass is None else f"{token.tail_mass:.2g}"
    return fit(
        f"{token.position:>6} {token.id:>8}  {pad(text, _TEXT)} {_number(token.logprob):>9} "
        f"{size:>7} {tail:>8} {bar(share, 10):<11}{best}",
        WIDTH,
    )


def _alternative(rank: int, item: Alternative) -> str:
    text = "" if item.text is None else _quoted(item.text)
    share = math.exp(item.logprob)
    mark = "*" if item.sampled else " "
    return (
        f"{mark}{rank:>7,} {item.id:>8}  {pad(text, _TEXT)} {_number(item.logprob):>9} "
        f"{share:>9.3g}  {bar(share, 40)}"
    )


def _name(item: Alternative) -> str:
    return str(item.id) if item.text is None else _quoted(item.text)


def _reward(item: SampleLine | SampleView) -> str:
    return "NaN/inf!" if item.nonfinite_reward else _number(item.reward)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    text = f"{value:.4f}"
    return text if len(text) <= 8 else f"{value:.3g}"


def _quoted(text: str) -> str:
    return printable(json.dumps(text, ensure_ascii=False))
