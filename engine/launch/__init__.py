"""Starting the processes of a run, and finding out who has started them."""
