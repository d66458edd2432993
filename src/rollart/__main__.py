"""`python -m rollart`: the command `rollart`, for where its script is not on the path."""

from rollart.cli.main import main

if __name__ == "__main__":
    main()
