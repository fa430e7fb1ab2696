"""Migration between nodes: who may, over which channel, and in which order, so that one copy runs at any
time.
"""
