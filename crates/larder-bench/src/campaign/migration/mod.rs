//! Two QEMUs with Larder between them, and what stands in the way: what the tests of migration and its campaigns share.
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

/// For whatever may take long on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// How often it is looked for what is waited for.
const LOOK: Duration = Duration::from_millis(10);
