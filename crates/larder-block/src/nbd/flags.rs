//! Commands, flags and error numbers of the transmission phase (spec, "Values").

use std::fmt;

use crate::error::Failure;

macro_rules! flag_set {
    ($(#[$doc:meta])* $name:ident { $($(#[$flag_doc:meta])* $flag:ident = $bit:expr, $text:expr;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub u16);

        impl $name {
            $($(#[$flag_doc])* pub const $flag: Self = Self(1 << $bit);)*

            /// No flag.
            pub const NONE: Self = Self(0);

            /// Returns true if every flag of `other` is in `self`.
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Returns the flags of both.
            #[must_use]
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// Returns `self`, and `other` too if `condition` holds.
            #[must_use]
            pub const fn with_if(self, condition: bool, other: Self) -> Self {
                if condition { self.with(other) } else { self }
            }

            /// Returns the flags that are in both.
            #[must_use]
            pub const fn intersection(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }

            /// Returns the flags of `self` that are not in `other`.
            #[must_use]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }
        }

        /// Formats the names of the flags, as in the spec; unknown ones as a number.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut rest = self.0;
                let mut separator = "";
                $(
                    if rest & 1 << $bit != 0 {
                        rest &= !(1 << $bit);
                        write!(f, "{separator}{}", $text)?;
                        separator = ", ";
                    }
                )*
                if rest != 0 || self.0 == 0 {
                    write!(f, "{separator}{rest:#x}")?;
                }
                Ok(())
            }
        }
    };
}

flag_set! {
    /// The features of an export (spec, "Transmission flags").
    TransmissionFlags {
        /// Always set.
        HAS_FLAGS = 0, "HAS_FLAGS";
        /// Changes are refused.
        READ_ONLY = 1, "READ_ONLY";
        /// The server supports `FLUSH`.
        FLUSH = 2, "SEND_FLUSH";
        /// The server supports the flag `FUA`.
        FUA = 3, "SEND_FUA";
        /// Seeking costs time.
        ROTATIONAL = 4, "ROTATIONAL";
        /// The server supports `TRIM`.
        TRIM = 5, "SEND_TRIM";
        /// The server supports `WRITE_ZEROES`.
        WRITE_ZEROES = 6, "SEND_WRITE_ZEROES";
        /// The server supports the flag `DF`.
        DF = 7, "SEND_DF";
        /// A flush on one connection covers the writes of other connections.
        CAN_MULTI_CONN = 8, "CAN_MULTI_CONN";
        /// The server supports `CACHE`.
        CACHE = 10, "SEND_CACHE";
        /// The server supports the flag `FAST_ZERO`.
        FAST_ZERO = 11, "SEND_FAST_ZERO";
    }
}

flag_set! {
    /// The options of a command (spec, "Command flags").
    CommandFlags {
        /// The change is durable before the reply.
        FUA = 0, "FUA";
        /// The zeroed range stays allocated.
        NO_HOLE = 1, "NO_HOLE";
        /// The reply has one content chunk at most.
        DF = 2, "DF";
        /// The reply has one extent per context at most.
        REQ_ONE = 3, "REQ_ONE";
        /// Fail at once rather than write zeroes slowly.
        FAST_ZERO = 4, "FAST_ZERO";
        /// A payload of the request's length follows (extended headers).
        PAYLOAD_LEN = 5, "PAYLOAD_LEN";
    }
}

/// The command of a request (spec, "Request types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
}

impl Command {
    /// Returns the command's number on the wire.
    pub const fn code(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Cache => 5,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
        }
    }

    /// Returns the command with that number.
    pub const fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Disconnect,
            3 => Self::Flush,
            4 => Self::Trim,
            5 => Self::Cache,
            6 => Self::WriteZeroes,
            7 => Self::BlockStatus,
            _ => return None,
        })
    }

    /// Returns true if the command changes the export.
    pub const fn is_change(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::WriteZeroes)
    }
}

/// Error numbers of replies (spec, "Error values").
#[allow(missing_docs)]
pub mod errors {
    pub const EPERM: u32 = 1;
    pub const EIO: u32 = 5;
    pub const ENOMEM: u32 = 12;
    pub const EINVAL: u32 = 22;
    pub const ENOSPC: u32 = 28;
    pub const EOVERFLOW: u32 = 75;
    pub const ENOTSUP: u32 = 95;
    pub const ESHUTDOWN: u32 = 108;
}

/// Returns the failure for an error number in a reply.
pub fn failure_of(error: u32) -> Failure {
    match error {
        errors::EPERM => Failure::ReadOnly,
        errors::ENOSPC => Failure::NoSpace,
        errors::ENOTSUP => Failure::Unsupported,
        errors::ENOMEM => Failure::Os(libc::ENOMEM),
        errors::EINVAL => Failure::Os(libc::EINVAL),
        errors::EOVERFLOW => Failure::Os(libc::EOVERFLOW),
        _ => Failure::Os(libc::EIO),
    }
}

/// Returns the error number for a failed request. `writes` is true for writes and write-zeroes, for which the spec
/// has another error if they exceed the export.
pub fn error_of(failure: Failure, writes: bool) -> u32 {
    match failure {
        Failure::NoSpace => errors::ENOSPC,
        Failure::ReadOnly => errors::EPERM,
        Failure::OutOfRange if writes => errors::ENOSPC,
        Failure::OutOfRange | Failure::Misaligned => errors::EINVAL,
        Failure::Unsupported => errors::ENOTSUP,
        Failure::Os(libc::ENOMEM) => errors::ENOMEM,
        Failure::Os(libc::EFBIG) => errors::ENOSPC,
        Failure::Os(_) | Failure::Unreachable | Failure::Invalid => errors::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_print_their_names() {
        let flags = TransmissionFlags::FLUSH.with(TransmissionFlags::TRIM);
        assert_eq!(flags.to_string(), "SEND_FLUSH, SEND_TRIM");
        assert_eq!(CommandFlags(1 << 9).with(CommandFlags::FUA).to_string(), "FUA, 0x200");
        assert_eq!(CommandFlags::NONE.to_string(), "0x0");
    }

    #[test]
    fn commands_and_their_numbers_agree() {
        for code in 0..20 {
            if let Some(command) = Command::from_code(code) {
                assert_eq!(command.code(), code);
            }
        }
    }
}
