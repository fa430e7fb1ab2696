"""The torpor command, one file per subcommand."""
