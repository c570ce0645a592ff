//! The C functions of `libnvidia-ml.so.1`. Each is a few lines over the facts, the control state and the session; those that
//! are not simulated answer so. No function calls another: a client may have loaded several copies of this library.
//!
//! Their documentation is NVIDIA's header; only what is special to the simulator is said here.
#![allow(
    missing_docs,
    unreachable_pub,
    non_snake_case,
    clippy::missing_safety_doc,
    clippy::not_unsafe_ptr_arg_deref,
    reason = "names, signatures and the contract of pointers are those of NVIDIA's header; \
              what makes a function public is the C ABI"
)]

/// Defines C functions: `fn name(arguments) |call| { body }`. Each is counted, obeys the control state, needs a session, and
/// answers with the code that the body's result stands for.
macro_rules! nvml {
    ($( fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$call:pat_param| $body:block )*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> nvml_wrapper_sys::bindings::nvmlReturn_t {
            const SLOT: usize = $crate::names::slot_of(stringify!($name));
            $crate::abi::call::run(SLOT, |$call: &$crate::abi::call::Call| $body)
        }
    )*};
}

mod affinity;
mod args;
pub(crate) mod call;
mod compute;
mod device;
mod events;
mod fabric;
mod fields;
mod handle;
mod health;
mod instances;
mod mig;
mod nvlink;
mod pci;
mod status;
mod stubs;
mod system;
mod telemetry;
