//! Two QEMUs with Larder between them, and relays that record or disturb the link: shared by the tests of migration
//! and its campaigns.
//!
//! ```text
//! Vm --unix-- [Tap] --unix-- Sender --TCP-- [Relay] --TCP-- Receiver --unix-- [Tap] --unix-- Vm
//! ```

pub mod host;
pub mod larder;
pub mod relay;
pub mod tap;
pub mod vm;

use std::time::Duration;

/// Limit for operations that may be slow on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Poll interval while waiting for a condition.
const LOOK: Duration = Duration::from_millis(10);
