//! All VMs of a host, looked at from outside: Prometheus' metrics, and a dashboard for browsers.
//!
//! Each VM's process tells of itself on its control socket ([`larder_vm::control`]); this crate finds those sockets, asks,
//! and tells on. It is on no way of the data: killing it harms nothing. It changes nothing but the budgets of VMs' memory, if
//! it is told to, and of those VMs that allow it ([`balance`]). `docs/metrics.md` and
//! `docs/guide/watching.md` describe it for users.
//!
//! Invariants:
//! - While nobody watches, nobody is asked. While somebody does, each VM is asked once a second, by one connection at a
//!   time, which stays until it is answered: a VM that is stuck costs a descriptor, and delays no other one.
//! - Nothing is asked of a socket that may be a disk's: a question would take a front-end's place there.
//! - Every text from a VM is taken for hostile, every number of things is bounded.
//! - Over TCP, on loopback too, a client without the token gets no data of a VM. On a unix socket the file's mode decides.

mod answers;
mod ask;
mod assets;
mod auth;
mod balance;
mod balancing;
mod events;
mod find;
mod fleet;
mod frames;
mod joined;
mod listen;
mod memory_frames;
mod metrics;
mod migration_frames;
mod server;
mod token_file;
mod vm;

pub use auth::{Token, TokenError};
pub use balance::Policy;
pub use balancing::BalanceConfig;
pub use listen::{HostConfig, HostError, LISTEN_DEFAULT, ListenAddress};
pub use server::{Address, Host, Stop};
pub use token_file::TokenFileError;
