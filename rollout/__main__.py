"""`python -m rollout`: the `rollout` command where it is not installed as one."""

from rollout.cli import main

if __name__ == "__main__":
    main(prog_name="rollout")
