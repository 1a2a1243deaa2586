"""The version of the package, read by the build and written into every dataset."""

VERSION = "0.1.0"
