//! Moves a running VM to another host.
//!
//! ```text
//! QEMU --unix--> send: parse, encode --TCP, TLS--> receive: decode, order --unix--> QEMU
//! ```
//!
//! The bytes of QEMU's migration stream are carried unchanged ([`send`], [`receive`]). The parser in [`stream`] finds
//! the pages of guest memory in them; its findings only guide the encoding.

pub mod base;
pub mod batch;
pub mod control;
pub mod decode;
pub mod encode;
pub mod frame;
pub mod limits;
pub mod link;
pub mod moving;
pub mod notes;
pub mod progress;
pub mod qmp;
pub mod rate_limiter;
pub mod receive;
pub mod send;
mod session;
pub mod stream;
pub mod tls;
pub mod wire;
