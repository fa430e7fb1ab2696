"""What a fault-tolerance policy is worth on a cluster: closed forms, simulation, traces."""
