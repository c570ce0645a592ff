//! One function for each name that the other modules do not define, so that the library is whole: some loaders refuse one
//! that is not.

include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
