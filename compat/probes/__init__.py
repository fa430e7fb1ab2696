"""What a node is, asked one thing at a time; one file for each probe."""
