"""`python -m devnet`: the dev chain as its own process."""

from devnet.cli import main

if __name__ == "__main__":
    main()
