//! A simulated libnvidia-ml.so.1 driven by a machine file.
