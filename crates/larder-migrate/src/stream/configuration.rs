//! Configuration section, at the beginning of a main channel.
//!
//! ```text
//! u8    7
//! be32  length, then the machine type
//! then any number of these:
//! u8    5, u8 length, name, be32 version
//!       configuration/target-page-bits  be32
//!       configuration/capabilities      be32 count; for each: u8 length, name
//!       configuration/uuid              16 bytes
//! ```
//!
//! The section has no length, and neither has an unknown subsection. Its end is then found by searching for what
//! follows.

use super::facts::MachineType;
use super::partial::{PartialStructure, UnknownFormat, be32};
use super::records::Context;

/// Maximum bytes of a machine type's name.
const MACHINE_BYTES_MAX: usize = 255;

const CAPABILITIES: &[u8] = b"configuration/capabilities";

/// Returns the length of the section's first part.
pub(super) fn machine_bytes(partial: &[u8]) -> Result<usize, UnknownFormat> {
    if partial.len() < 5 {
        return Ok(5);
    }
    match be32(partial, 1) as usize {
        len @ ..=MACHINE_BYTES_MAX => Ok(5 + len),
        _ => Err(UnknownFormat),
    }
}

/// Parses the section's first part.
pub(super) fn machine(cx: &mut Context<'_>) {
    cx.facts.machine = MachineType::new(&cx.partial.get()[5..]);
    cx.facts.count_change();
}

/// Returns the length of a subsection; for the capabilities, the length up to the first of them.
pub(super) fn subsection_bytes(partial: &[u8]) -> Result<usize, UnknownFormat> {
    let Some(&len) = partial.get(1) else { return Ok(2) };
    let name_end = 2 + usize::from(len);
    if partial.len() < name_end {
        return Ok(name_end);
    }
    let body = match &partial[2..name_end] {
        b"configuration/target-page-bits" => 4,
        CAPABILITIES => 4,
        b"configuration/uuid" => 16,
        _ => return Err(UnknownFormat),
    };
    Ok(name_end + 4 + body)
}

/// Returns the number of capabilities that follow a subsection.
pub(super) fn capabilities(partial: &PartialStructure) -> u32 {
    let bytes = partial.get();
    let name_end = 2 + usize::from(bytes[1]);
    match &bytes[2..name_end] {
        CAPABILITIES => be32(bytes, name_end + 4),
        _ => 0,
    }
}

/// Returns the length of a capability.
pub(super) fn capability_bytes(partial: &[u8]) -> Result<usize, UnknownFormat> {
    Ok(1 + partial.first().map_or(0, |&len| usize::from(len)))
}

/// Parses a capability that is on. Only those are sent that the destination must enable as well.
pub(super) fn capability(cx: &mut Context<'_>) {
    if &cx.partial.get()[1..] == b"x-ignore-shared" {
        cx.facts.ignore_shared = true;
        cx.facts.count_change();
    }
}
