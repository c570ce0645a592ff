//! The embedded cluster of the demo: API server, scheduler loop and kubelet stand-in.
