"""The command line by the name of the package: ``python -m frostline``."""

from frostline.cli import main

if __name__ == "__main__":
    main()
