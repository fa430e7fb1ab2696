"""The main job as a show: a container sleeps and wakes up under a containerd of its own."""
