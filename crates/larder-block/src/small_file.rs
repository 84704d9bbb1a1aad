//! Small files that people and programs write for Larder: configuration, state files, keys.
//!
//! Invariants, whatever is at the path:
//! - Opening does not wait: neither for the other end of a FIFO, nor for a terminal's carrier. Devices are not even
//!   opened, because opening some of them has effects.
//! - The number of bytes read is bounded.
//!
//! Files of `/proc` and `/sys` are read elsewhere: the kernel writes them, and bounds them.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// The maximum length in bytes of a file that people write: configuration, certificates, keys, records of a few
/// lines.
pub const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// The maximum length in bytes of a state file that Larder writes itself.
pub const STATE_BYTES_MAX: u64 = 64 << 20;

/// Opens the regular file at `path` for reading.
///
/// # Errors
/// The host's error, or the path does not lead to a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    check_is_regular(path.metadata()?.file_type())?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    // The file may have been exchanged in between.
    check_is_regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads the regular file at `path`, of at most `bytes_max` bytes.
///
/// # Errors
/// See [`open`]; or the file is longer.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    read_open(open(path)?, bytes_max)
}

/// Reads an open file of at most `bytes_max` bytes.
///
/// # Errors
/// The host's error, or the file is not regular or longer.
pub fn read_open(file: File, bytes_max: u64) -> io::Result<Vec<u8>> {
    check_is_regular(file.metadata()?.file_type())?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > bytes_max {
        true => Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it is longer than the limit of {bytes_max} bytes"),
        )),
        false => Ok(bytes),
    }
}

/// Reads the text file at `path`, of at most `bytes_max` bytes.
///
/// # Errors
/// See [`read`]; or the content is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    decode_utf8(read(path, bytes_max)?)
}

/// Reads a text of at most `bytes_max` bytes from an open file.
///
/// # Errors
/// See [`read_open`]; or the content is not UTF-8.
pub fn read_open_text(file: File, bytes_max: u64) -> io::Result<String> {
    decode_utf8(read_open(file, bytes_max)?)
}

fn decode_utf8(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "stream did not contain valid UTF-8"))
}

fn check_is_regular(kind: FileType) -> io::Result<()> {
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {what}, not a regular file")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn irregular_files_are_refused_without_waiting() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let mkfifo = std::process::Command::new("mkfifo").arg(at("fifo")).status();
        assert!(mkfifo.expect("mkfifo is installed").success());
        symlink("/dev/zero", at("zeros")).expect("links");
        std::fs::write(at("long"), [b'#'; 11]).expect("writes");
        std::fs::write(at("bytes"), [0xff]).expect("writes");
        std::fs::write(at("right"), "0123456789").expect("writes");
        let _listener = std::os::unix::net::UnixListener::bind(at("socket")).expect("binds");
        for (name, why) in [
            ("fifo", "it is a FIFO, not a regular file"),
            ("zeros", "it is a device, not a regular file"),
            ("socket", "it is a socket, not a regular file"),
            ("long", "it is longer than the limit of 10 bytes"),
            ("bytes", "UTF-8"),
            (".", "Is a directory"),
            ("none", "No such file"),
        ] {
            let error = read_text(&at(name), 10).expect_err(name).to_string();
            assert!(error.contains(why), "{name}: {error}");
        }
        assert_eq!(read_text(&at("right"), 10).ok().as_deref(), Some("0123456789"));
    }
}
