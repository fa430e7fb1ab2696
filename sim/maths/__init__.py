"""Laws of chance, closed forms and statistics, without a clock."""
