//! Moves a running VM to another host.
//!
//! ```text
//! QEMU --unix--> send: look through, encode --TCP, TLS--> receive: decode, order --unix--> QEMU
//! ```
//!
//! What QEMU's migration says is carried byte for byte ([`send`], [`receive`]); where pages of guest memory lie in it is
//! known from [`stream`], and is only a hint for what to do with them.

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
pub mod pace;
pub mod progress;
pub mod qmp;
pub mod receive;
pub mod send;
mod session;
pub mod stream;
pub mod tls;
pub mod wire;
