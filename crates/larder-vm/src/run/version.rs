//! The version of QEMU.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::process::{Command, Stdio};

/// A version of QEMU: major and minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion(pub u32, pub u32);

/// Reason why the version cannot be determined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum VersionError {
    #[error("cannot run {}: {source}; give the QEMU program with its arguments after --", program.display())]
    Run { program: OsString, source: std::io::Error },
    #[error("{} --version does not print QEMU's version ('{first_line}'); give the QEMU program after --", program.display())]
    NotQemu { program: OsString, first_line: String },
}

impl QemuVersion {
    /// Runs the program to get its version.
    ///
    /// # Errors
    /// The program cannot be started, or is not QEMU.
    pub fn probe(program: &OsStr) -> Result<Self, VersionError> {
        let output = Command::new(program)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .map_err(|source| VersionError::Run { program: program.to_owned(), source })?;
        let text = String::from_utf8_lossy(&output.stdout);
        Self::parse(&text).ok_or_else(|| VersionError::NotQemu {
            program: program.to_owned(),
            first_line: text.lines().next().unwrap_or_default().to_owned(),
        })
    }

    /// Parses the output of `--version`: `QEMU emulator version 7.2.22 (Debian ...)`.
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once("QEMU")?.1.split_once("version ")?;
        let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some(Self(numbers.next()?.ok()?, numbers.next()?.ok()?))
    }

    /// Returns the option of a socket chardev, with its value, that makes QEMU reconnect soon after a disconnect.
    pub fn reconnect(self) -> (&'static str, &'static str) {
        if self >= Self(9, 2) { ("reconnect-ms", "100") } else { ("reconnect", "1") }
    }
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_parsed_from_qemu_output() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c) 2003-2022";
        assert_eq!(QemuVersion::parse(debian), Some(QemuVersion(7, 2)));
        assert_eq!(QemuVersion::parse("QEMU emulator version 10.0.13"), Some(QemuVersion(10, 0)));
        assert_eq!(QemuVersion::parse("true (GNU coreutils) 9.1"), None);
        assert_eq!(QemuVersion::parse("QEMU emulator version unknown"), None);
    }

    #[test]
    fn reconnect_option_depends_on_version() {
        assert_eq!(QemuVersion(7, 2).reconnect().0, "reconnect");
        assert_eq!(QemuVersion(9, 1).reconnect().0, "reconnect");
        assert_eq!(QemuVersion(9, 2).reconnect().0, "reconnect-ms");
        assert_eq!(QemuVersion(10, 0).reconnect().0, "reconnect-ms");
    }

    #[test]
    fn other_program_is_not_qemu() {
        assert!(matches!(QemuVersion::probe(OsStr::new("true")), Err(VersionError::NotQemu { .. })));
        let missing = QemuVersion::probe(OsStr::new("/no/such/qemu")).expect_err("is not there");
        assert!(missing.to_string().contains("/no/such/qemu"), "{missing}");
    }
}
