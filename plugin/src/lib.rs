//! The node daemon: discovery, the device plugin and the hand-over to kubelet.
