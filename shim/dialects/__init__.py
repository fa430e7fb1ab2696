"""What each real runtime's command line looks like: argv and exit codes in, argv and exit codes out."""
