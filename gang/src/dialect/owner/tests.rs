//! What is read of each kind of object.
