"""The network lab: nodes as network namespaces of one machine, with real pods, engines and clients."""
