"""Why an image would not restore, or would restore and then go wrong: a small function for each reason."""
