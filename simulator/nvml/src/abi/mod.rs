//! The C functions of `libnvidia-ml.so.1`. Each is a few lines over the facts, the control state and the session; those that
//! are not simulated answer so. No function calls another: a client may have loaded several copies of this library.
//!
//! Their documentation is NVIDIA's header; only what is special to the simulator is stated here.
#![allow(
    missing_docs,
    unreachable_pub,
    non_snake_case,
    clippy::missing_safety_doc,
    clippy::not_unsafe_ptr_arg_deref,
    reason = "names, signatures and the contract of pointers are those of NVIDIA's header; \
              what makes a function public is the C ABI"
)]

/// Defines C functions: `fn name | other_name(arguments) |call| { body }`. Each is counted, applies the control state,
/// needs a session, and returns the code of the body's result.
macro_rules! nvml {
    (@define $name:ident ($($argument:ident: $type:ty),* $(,)?) |$call:pat_param| $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> nvml_wrapper_sys::bindings::nvmlReturn_t {
            const SLOT: usize = $crate::names::slot_of(stringify!($name));
            $crate::abi::call::run(SLOT, |$call: &$crate::abi::call::Call| $body)
        }
    };
    (@each [$($name:ident)+] $arguments:tt |$call:pat_param| $body:block) => {
        $( nvml!(@define $name $arguments |$call| $body); )+
    };
    (
        fn $($name:ident)|+ ($($argument:ident: $type:ty),* $(,)?) |$call:pat_param| $body:block
        $($rest:tt)*
    ) => {
        nvml!(@each [$($name)+] ($($argument: $type),*) |$call| $body);
        nvml!($($rest)*);
    };
    () => {};
}

/// Defines C functions that write one value of a whole GPU: `name | other_name: type = |gpu| value;`.
macro_rules! nvml_get {
    ($( $($name:ident)|+: $type:ty = |$gpu:pat_param| $value:expr; )*) => {
        $( $( nvml!(@define $name (device: Device, out: OutPointer<$type>) |call| {
            let $gpu = call.gpu(device)?;
            out.put($value)
        }); )+ )*
    };
}

/// A struct of another version of NVML's, with the fields that both have copied.
macro_rules! of_version {
    ($from:expr => $($version:ident)::+ { $($field:ident),* } $(, $other:ident: $value:expr)*) => {
        $($version)::+ { $($field: $from.$field,)* $($other: $value),* }
    };
}

mod args;
pub(crate) mod call;
mod compute;
mod device;
mod events;
mod fields;
mod handle;
mod health;
mod instances;
mod links;
mod profiling;
mod system;
mod telemetry;
mod topology;

/// One function for each name that the other modules do not define, so that the library is whole: some loaders refuse one
/// that is not.
mod stubs {
    include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
}
