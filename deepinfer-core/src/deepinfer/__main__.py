"""`python -m deepinfer` is the same as the `deepinfer` command."""

from deepinfer.cli import main

main()
