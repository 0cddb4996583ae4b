"""``python -m isobn_finetune``."""

from isobn_finetune.cli import main

if __name__ == "__main__":
    main()
