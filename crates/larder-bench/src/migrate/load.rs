//! What the guest does with its memory.

use std::process::Command;

use anyhow::ensure;
use clap::{ValueEnum, builder::PossibleValue};
use larder_bench::campaign::guest::test_bed;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Load {
    Constant,
    Sequence,
    Random,
    Mixed,
    Memcached,
}

/// What [`Load::Memcached`] needs besides in the guest, in the folders of its `PATH`.
///
/// `memcached-load` has the options of `guest-load` and says what that says. It talks to the memcached at 127.0.0.1:11211:
/// of 10 requests 9 set and 1 gets, of keys of 128 bytes and values of 2 KiB that are random and follow from key and version.
const MEMCACHED: [&str; 2] = ["memcached", "memcached-load"];

impl Load {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Sequence => "sequence",
            Self::Random => "random",
            Self::Mixed => "mixed",
            Self::Memcached => "memcached",
        }
    }

    /// Whether the guest has what it takes.
    pub(super) fn is_there(self) -> anyhow::Result<()> {
        if self != Self::Memcached {
            return Ok(());
        }
        let image = test_bed("guest.cpio.gz")?;
        let listed = Command::new("sh")
            .args(["-c", r#"gzip -dc -- "$1" | cpio -t --quiet"#, "sh"])
            .arg(&image)
            .output()?;
        let files = String::from_utf8_lossy(&listed.stdout);
        for program in MEMCACHED {
            ensure!(
                files.lines().any(|file| file.rsplit('/').next() == Some(program)),
                "{} has no {program}: testbed/build-guest.sh does not put it there yet",
                image.display()
            );
        }
        Ok(())
    }

    /// The guest's script: `size` in MiB, `rate` in 10^6 bytes per second, of `check` pages one is checked.
    pub(super) fn script(self, size: u64, rate: u64, check: u64) -> String {
        let options = format!("--size {size} --rate {rate} --check {check}");
        match self {
            Self::Memcached => {
                // Room for keys, and for what slabs leave unused: nothing may be thrown out.
                let room = size * 2;
                format!(
                    "echo root:x:0:0::/root:/bin/sh >/etc/passwd\nip link set lo up\n\
                     memcached -u root -l 127.0.0.1 -t 1 -m {room} &\nexec memcached-load {options}\n"
                )
            }
            _ => format!("exec guest-load {} {options}\n", self.name()),
        }
    }
}

impl ValueEnum for Load {
    fn value_variants<'a>() -> &'a [Self] {
        &[
            Self::Constant,
            Self::Sequence,
            Self::Random,
            Self::Mixed,
            Self::Memcached,
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Constant => "Each page is one word all over",
            Self::Sequence => "Numbers that count up",
            Self::Random => "Nothing that could be compressed",
            Self::Mixed => "Text, objects of a heap, few words, random pages",
            Self::Memcached => "memcached with random values",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}
