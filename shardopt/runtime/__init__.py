"""The processes of a job: launch and join them, watch them for hangs, keep their snapshots, lock their folders."""
