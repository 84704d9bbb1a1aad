//! Parsers for the mode, owner and group of a socket.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use nix::unistd::{Group, User};

/// Parses an octal mode that lets at least the owner connect.
///
/// # Errors
/// The text is no such mode.
pub fn parse_huge_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777 && mode & 0o600 == 0o600)
        .ok_or_else(|| "give an octal mode in quotes that has at least 0600, as in \"0660\"".to_owned())
}

/// Parses the name or the ID of a user.
///
/// # Errors
/// There is no such user.
pub fn parse_user(text: &str) -> Result<u32, String> {
    parse_id("user", text, |name| Ok(User::from_name(name)?.map(|user| user.uid.as_raw())))
}

/// Parses the name or the ID of a group.
///
/// # Errors
/// There is no such group.
pub fn parse_group(text: &str) -> Result<u32, String> {
    parse_id("group", text, |name| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw())))
}

/// Results of name lookups: a confined process that reloads its file cannot look them up again.
static RESOLVED_IDS: Mutex<BTreeMap<(&str, String), u32>> = Mutex::new(BTreeMap::new());

fn parse_id(
    kind: &'static str,
    text: &str,
    look_up: impl FnOnce(&str) -> nix::Result<Option<u32>>,
) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let mut known = RESOLVED_IDS.lock().unwrap_or_else(PoisonError::into_inner);
    match look_up(text) {
        Ok(Some(number)) => {
            known.insert((kind, text.to_owned()), number);
            Ok(number)
        }
        result => match (known.get(&(kind, text.to_owned())), result) {
            (Some(number), _) => Ok(*number),
            (None, Err(error)) => {
                Err(format!("{kind} '{text}' cannot be looked up: {error}; a numeric ID needs no lookup"))
            }
            (None, _) => Err(format!("there is no {kind} '{text}' on this host")),
        },
    }
}
