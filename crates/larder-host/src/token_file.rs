//! Token that `larder host` creates where `--token-file` is not given.
//!
//! Invariants:
//! - The file is readable by its user only (0600), in a directory that no other user can write to.
//! - Processes that start at the same time end up with one token: the file is written under a temporary name, and
//!   `link` gives it the final name with its whole content, or fails because another process was first. A crash
//!   before that leaves a temporary file without effect.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use larder_vm::image::state_directory;
use larder_vm::runtime_directory::check_exclusive_owner;
use ring::rand::{SecureRandom, SystemRandom};

use crate::auth::{Token, TokenError};

/// File name of the token.
const TOKEN_FILE_NAME: &str = "host-token";

/// Root's directory. `/var/lib/larder` may belong to another user, and `/var/lib/larder-host` belongs to the service.
const ROOT_DIRECTORY: &str = "/var/lib/larder-root";

/// Random bytes of a token, each of which is two hexadecimal characters.
const RANDOM_BYTES: usize = 32;

/// Reason why there is no token.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TokenFileError {
    #[error("there is no directory for a token, because none of $STATE_DIRECTORY, $XDG_STATE_HOME and $HOME is set")]
    NoDirectory,
    #[error("cannot store a token in {}: {source}", directory.display())]
    Directory { directory: PathBuf, source: io::Error },
    #[error("cannot write a token to {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{0}; if the file is removed, `larder host` creates another token")]
    Token(#[from] TokenError),
    #[error("cannot create a token, because the kernel gives no random numbers")]
    Random,
}

/// Returns this user's token and the path of its file; creates the token if it does not exist.
///
/// The file is `host-token` in systemd's `$STATE_DIRECTORY`, for root in `/var/lib/larder-root`, for other users in
/// `$XDG_STATE_HOME/larder` or `~/.local/state/larder`.
///
/// # Errors
/// See [`TokenFileError`].
pub(crate) fn default_token() -> Result<(Token, PathBuf), TokenFileError> {
    let is_service = std::env::var_os("STATE_DIRECTORY").is_some();
    let directory = match rustix::process::geteuid().is_root() && !is_service {
        true => PathBuf::from(ROOT_DIRECTORY),
        false => state_directory().ok_or(TokenFileError::NoDirectory)?,
    };
    token_in(&directory)
}

fn token_in(directory: &Path) -> Result<(Token, PathBuf), TokenFileError> {
    let failed = |source| TokenFileError::Directory { directory: directory.to_owned(), source };
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory).map_err(failed)?;
    check_exclusive_owner(directory).map_err(failed)?;
    let path = directory.join(TOKEN_FILE_NAME);
    if !path.try_exists().map_err(failed)? {
        create(&path)?;
    }
    Ok((Token::read(&path)?, path))
}

/// Creates a token, unless another process does so first.
fn create(path: &Path) -> Result<(), TokenFileError> {
    let failed = |source| TokenFileError::Write { path: path.to_owned(), source };
    let mut random = [0; RANDOM_BYTES];
    SystemRandom::new().fill(&mut random).map_err(|_| TokenFileError::Random)?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let new = path.with_file_name(format!(".{TOKEN_FILE_NAME}.{}", std::process::id()));
    // A killed process with the same PID may have left one.
    let _ = fs::remove_file(&new);
    let written = write(&new, &text).and_then(|()| fs::hard_link(&new, path));
    // The link under the final name stays.
    let _ = fs::remove_file(&new);
    match written {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        written => written.map_err(failed)?,
    }
    let directory = path.parent().unwrap_or(path);
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)?;
    tracing::info!(
        file = %path.display(),
        "token created; browsers and API clients must present it"
    );
    Ok(())
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{text}")?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// The first start creates a long token that only its user can read, and later starts read the same one.
    #[test]
    fn token_is_created_once_for_its_user() {
        let temporary = tempfile::tempdir().expect("a folder");
        let directory = temporary.path().join("state");
        let (_, path) = token_in(&directory).expect("creates it");
        let text = fs::read_to_string(&path).expect("is there");
        assert_eq!(text.trim_end().len(), 2 * RANDOM_BYTES);
        assert_eq!(path.metadata().expect("is there").permissions().mode() & 0o777, 0o600);
        assert_eq!(directory.metadata().expect("is there").permissions().mode() & 0o777, 0o700);
        let (token, _) = token_in(&directory).expect("reads it");
        assert!(token.matches(text.trim_end().as_bytes()));
        let names = fs::read_dir(&directory).expect("is there").count();
        assert_eq!(names, 1, "nothing else is left");
    }

    /// A directory that others can write to and a token that is too short are refused, with advice.
    #[test]
    fn unsafe_directory_and_weak_token_are_refused() {
        let directory = tempfile::tempdir().expect("a folder");
        fs::write(directory.path().join(TOKEN_FILE_NAME), "short\n").expect("writes");
        fs::set_permissions(directory.path().join(TOKEN_FILE_NAME), Permissions::from_mode(0o600)).expect("ours");
        let weak = token_in(directory.path()).err().expect("is too short").to_string();
        assert!(weak.contains("16 printable characters") && weak.contains("if the file is removed"), "{weak}");
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).expect("ours");
        let open = token_in(directory.path()).err().expect("others can write").to_string();
        assert!(open.contains("others can write to it"), "{open}");
    }
}
