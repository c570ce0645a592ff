//! Enums of names that the API has, each with one sentence about it.

/// An enum with the name of each value as it is written, and its sentence without a full stop, which is also its
/// documentation.
macro_rules! described {
    ($(#[$of:meta])* $enum:ident { $($(#[$doc:meta])* $name:ident, $written:expr, $text:literal;)* }) => {
        $(#[$of])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $enum {
            $(#[doc = $text] $(#[$doc])* $name,)*
        }

        impl $enum {
            /// Every value, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// As it is written into an object.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $written,)*
                }
            }

            /// What it means, as a sentence without a full stop.
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }

        impl std::fmt::Display for $enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

pub(crate) use described;
