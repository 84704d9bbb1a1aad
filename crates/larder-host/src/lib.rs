//! Host-wide view of all VMs: Prometheus metrics, a dashboard for browsers, and the balancing of memory budgets.
//!
//! Each VM's process reports its state on its control socket ([`larder_vm::control`]). This crate finds those
//! sockets, polls them, and republishes the answers. It is not on the data path: killing it harms nothing. It changes
//! only the budgets of VMs' memory, and only if that is enabled and the VM allows it ([`balance`]). `docs/metrics.md`
//! and `docs/guide/watching.md` describe it for users.
//!
//! Invariants:
//! - Without a watcher, no VM is polled. With one, each VM is polled once a second over one connection, which stays
//!   open until it is answered: a stuck VM costs one descriptor and delays no other VM.
//! - A socket that may be a disk's is never queried: a query would occupy the slot of a front-end there.
//! - Every text from a VM is treated as hostile, and the number of things of each kind is bounded.
//! - Over TCP, on loopback too, a client without the token gets no data of a VM. On a unix socket the file's mode
//!   decides.

mod assembled_vm;
mod assets;
mod auth;
mod balance;
mod balance_loop;
mod control_client;
mod discovery;
mod events;
mod fleet;
mod frames;
mod handlers;
mod listen;
mod memory_frames;
mod metrics;
mod migration_frames;
mod server;
mod token_file;
mod vm_process;

pub use auth::{Token, TokenError};
pub use balance::BalancePolicy;
pub use balance_loop::BalanceConfig;
pub use listen::{HostConfig, HostError, LISTEN_DEFAULT, ListenAddress};
pub use server::{HostServer, ServerAddress, StopHandle};
pub use token_file::TokenFileError;
