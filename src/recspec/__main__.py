"""`python -m recspec`, which is also what torchrun starts."""

from recspec.cli import main

if __name__ == "__main__":
    main()
