//! The configuration section, with which a main channel begins.
//!
//! ```text
//! u8    7
//! be32  length, and the machine type
//! then any of these, each
//! u8    5, u8 length, name, be32 version
//!       configuration/target-page-bits  be32
//!       configuration/capabilities      be32 count; of each u8 length, name
//!       configuration/uuid              16 bytes
//! ```
//!
//! Nothing says where it ends, or where one that is not known would: what follows it is looked for then.

use super::facts::Machine;
use super::held::{Held, Unknown, be32};
use super::records::Context;

/// Longer names of a machine type are none.
const MACHINE_BYTES_MAX: usize = 255;

const CAPABILITIES: &[u8] = b"configuration/capabilities";

/// How long the section's first part is.
pub(super) fn machine_bytes(held: &[u8]) -> Result<usize, Unknown> {
    if held.len() < 5 {
        return Ok(5);
    }
    match be32(held, 1) as usize {
        len @ ..=MACHINE_BYTES_MAX => Ok(5 + len),
        _ => Err(Unknown),
    }
}

/// The section's first part.
pub(super) fn machine(cx: &mut Context<'_>) {
    cx.facts.machine = Machine::of(&cx.held.get()[5..]);
    cx.facts.changed();
}

/// How long a subsection is; of the capabilities, up to the first of them.
pub(super) fn subsection_bytes(held: &[u8]) -> Result<usize, Unknown> {
    let Some(&len) = held.get(1) else { return Ok(2) };
    let name_end = 2 + usize::from(len);
    if held.len() < name_end {
        return Ok(name_end);
    }
    let body = match &held[2..name_end] {
        b"configuration/target-page-bits" => 4,
        CAPABILITIES => 4,
        b"configuration/uuid" => 16,
        _ => return Err(Unknown),
    };
    Ok(name_end + 4 + body)
}

/// How many capabilities follow a subsection.
pub(super) fn capabilities(held: &Held) -> u32 {
    let bytes = held.get();
    let name_end = 2 + usize::from(bytes[1]);
    match &bytes[2..name_end] {
        CAPABILITIES => be32(bytes, name_end + 4),
        _ => 0,
    }
}

/// How long a capability is.
pub(super) fn capability_bytes(held: &[u8]) -> Result<usize, Unknown> {
    Ok(1 + held.first().map_or(0, |&len| usize::from(len)))
}

/// A capability that is on. Only those are here that the destination must have on as well.
pub(super) fn capability(cx: &mut Context<'_>) {
    if &cx.held.get()[1..] == b"x-ignore-shared" {
        cx.facts.ignore_shared = true;
        cx.facts.changed();
    }
}
