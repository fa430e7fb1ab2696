"""From outcomes to sweeps, tables, plots, reports and policies."""
