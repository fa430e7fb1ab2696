"""Study files: what is asked, read and checked."""
