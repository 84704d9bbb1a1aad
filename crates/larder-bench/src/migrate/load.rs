//! The guest's use of its memory.

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

/// Programs that [`Load::Memcached`] runs in the guest. `memcached-load` has the options and the output of
/// `guest-load`, and is a client of the local memcached: of 10 requests 9 set and 1 gets, with random values of 2
/// KiB. Its rate counts the values.
const MEMCACHED_PROGRAMS: [&str; 2] = ["memcached", "memcached-load"];

impl Load {
    /// Loads with published results, and random pages, at rates that an emulated memcached does not reach.
    pub(super) const DEFAULT: [Self; 4] = [Self::Constant, Self::Sequence, Self::Random, Self::Memcached];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Sequence => "sequence",
            Self::Random => "random",
            Self::Mixed => "mixed",
            Self::Memcached => "memcached",
        }
    }

    /// Checks that the guest image has the load's programs; one built before memcached was added lacks them.
    pub(super) fn is_there(self) -> anyhow::Result<()> {
        if self != Self::Memcached {
            return Ok(());
        }
        let image = test_bed("guest.cpio.gz")?;
        let listing =
            Command::new("sh").args(["-c", r#"gzip -dc -- "$1" | cpio -t --quiet"#, "sh"]).arg(&image).output()?;
        let files = String::from_utf8_lossy(&listing.stdout);
        for program in MEMCACHED_PROGRAMS {
            ensure!(
                files.lines().any(|file| file.rsplit('/').next() == Some(program)),
                "{} has no {program}: run testbed/setup.sh again",
                image.display()
            );
        }
        Ok(())
    }

    /// Returns the guest's script: `size` in MiB, `rate` in 10^6 bytes per second; one in `check` pages is checked.
    pub(super) fn script(self, size: u64, rate: u64, check: u64) -> String {
        let options = format!("--size {size} --rate {rate} --check {check}");
        match self {
            Self::Memcached => {
                // Keys, headers and unused space of slabs take 272 bytes for each value, so this avoids evictions.
                let memcached_mib = size * 5 / 4 + 16;
                format!(
                    "echo root:x:0:0::/root:/bin/sh >/etc/passwd\nip link set lo up\n\
                     memcached -u root -l 127.0.0.1 -t 1 -m {memcached_mib} &\nexec memcached-load {options}\n"
                )
            }
            _ => format!("exec guest-load {} {options}\n", self.name()),
        }
    }
}

impl ValueEnum for Load {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Constant, Self::Sequence, Self::Random, Self::Mixed, Self::Memcached]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Constant => "Pages of one repeated word",
            Self::Sequence => "Ascending numbers",
            Self::Random => "Incompressible pages",
            Self::Mixed => "Text, heap objects, sparse pages, random pages",
            Self::Memcached => "memcached with random values",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}

#[cfg(test)]
mod tests {
    use larder_bench::campaign::migration::vm::{Machine, Release};

    use super::*;

    #[test]
    /// The load reports a value that memcached no longer has.
    fn memcached_load_detects_lost_value() -> anyhow::Result<()> {
        Load::Memcached.is_there()?;
        // Slow enough that most values are older than a second, since flush_all spares the newest second.
        let load = Load::Memcached.script(4, 1, 1);
        let script = format!(
            r#"{} | while read -r line; do
                echo "$line"
                [ "$line" != "ROUND 1" ] || printf 'flush_all\r\nquit\r\n' | nc 127.0.0.1 11211
            done"#,
            load.trim_end()
        );
        let machine = Machine::running(Release::Host, 512, &script)?;
        let guest = machine.boot()?;
        let end = guest.wait_for_console("ROUND 2", 1).expect_err("the load detects the lost values");
        let text = format!("{end:#}");
        assert!(text.contains("MISMATCH value") && text.contains("it is not there"), "{text}");
        Ok(())
    }
}
