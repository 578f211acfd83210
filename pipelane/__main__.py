"""``python -m pipelane``."""

from pipelane.cli import main

if __name__ == "__main__":
    main()
