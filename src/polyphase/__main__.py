"""``python -m polyphase``: the same as the command `polyphase`."""

from polyphase.engine.cli import main

if __name__ == "__main__":
    main()
