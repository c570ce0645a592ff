//! The gRPC APIs of kubelet: device plugin v1beta1 and pod resources v1.
