"""``python -m polyphase.engine``: the same as the command `polyphase`."""

from .cli import main

if __name__ == "__main__":
    main()
