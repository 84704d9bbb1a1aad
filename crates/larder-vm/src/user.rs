//! Switch to another user, once everything that requires root is open. An attacker who takes over this process by a
//! fault in it then has the rights of that user only.
//!
//! Invariant: when [`switch_user`] has returned, every thread has that user's ID, the user's groups and no
//! capabilities, and neither it nor a program that it starts gains other rights again (`no_new_privs` of the calling
//! thread and of threads that it creates). If a step fails, the process may have a mixture of both users' rights: it
//! must end.

use nix::unistd::{Uid, User, initgroups, setresgid, setresuid};

/// Reason why a process cannot switch to a user.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum UserError {
    #[error("--user {name}: no such user; give a name, or the number of an existing user")]
    Unknown { name: String },
    #[error("--user {name}: the users of this host cannot be looked up: {source}")]
    LookUp { name: String, source: nix::Error },
    #[error("--user {name}: only root can switch to another user; start this as root, or as {name} without --user")]
    NotRoot { name: String },
    #[error("--user {name}: {step}: {source}")]
    Step { name: String, step: &'static str, source: nix::Error },
}

/// Returns the user with this name or number.
pub(crate) fn find_user(name: &str) -> Result<User, UserError> {
    let found = match name.parse() {
        Ok(number) => User::from_uid(Uid::from_raw(number)),
        Err(_) => User::from_name(name),
    };
    found
        .map_err(|source| UserError::LookUp { name: name.to_owned(), source })?
        .ok_or_else(|| UserError::Unknown { name: name.to_owned() })
}

/// Switches this process permanently to the user with this name or number; returns the user's ID.
///
/// # Errors
/// See [`UserError`]; after [`UserError::Step`] the process must end.
pub fn switch_user(name: &str) -> Result<u32, UserError> {
    let user = find_user(name)?;
    let step = |step: &'static str| move |source| UserError::Step { name: name.to_owned(), step, source };
    if user.uid != Uid::effective() {
        if !Uid::effective().is_root() {
            return Err(UserError::NotRoot { name: name.to_owned() });
        }
        let account = std::ffi::CString::new(user.name.as_str()).map_err(|_| UserError::Unknown { name: user.name })?;
        // The C library applies these to all threads. The order matters: the first two require root.
        initgroups(&account, user.gid).map_err(step("the user's groups cannot be set"))?;
        setresgid(user.gid, user.gid, user.gid).map_err(step("the user's group cannot be set"))?;
        setresuid(user.uid, user.uid, user.uid).map_err(step("root's rights cannot be dropped"))?;
    }
    rustix::thread::set_no_new_privs(true)
        .map_err(|error| step("no_new_privs cannot be set")(nix::Error::from_raw(error.raw_os_error())))?;
    Ok(user.uid.as_raw())
}
