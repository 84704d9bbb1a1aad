//! Recognition of QEMU processes by their command lines and thread names.

use std::ffi::OsString;
use std::path::Path;

use larder_vm::run::arguments::{Argument, split};
use larder_vm::run::keyval::{KeyValues, parse_bool};
use larder_vm::run::size::parse_size;

const MIB: u64 = 1 << 20;

/// QEMU's default RAM size, in bytes.
const RAM_DEFAULT: u64 = 128 * MIB;

/// Prefix of the names that QEMU gives its vCPU threads with `debug-threads=on`.
const VCPU_THREAD: &str = "CPU ";
/// Prefix of the name of the single thread on which vCPUs take turns (TCG with `thread=single`).
const ALL_VCPUS_THREAD: &str = "ALL CPUs/";

/// Returns whether a program of this name runs VMs: `qemu-system-x86_64` or one of the names that distributions use.
pub(crate) fn is_qemu(program: &str) -> bool {
    program.starts_with("qemu-system-") || ["qemu-kvm", "kvm"].contains(&program)
}

/// Returns the file name of a command's program.
pub(crate) fn program(arguments: &[OsString]) -> Option<String> {
    let name = Path::new(arguments.first()?).file_name()?;
    Some(name.to_string_lossy().into_owned())
}

/// Returns whether a thread runs one vCPU or all of them.
pub(crate) fn is_vcpu(thread: &str) -> bool {
    let number = thread.strip_prefix(VCPU_THREAD).and_then(|rest| rest.split_once('/'));
    number.is_some_and(|(number, _)| number.parse::<u32>().is_ok()) || is_all_vcpus(thread)
}

/// Returns whether a thread runs all vCPUs.
pub(crate) fn is_all_vcpus(thread: &str) -> bool {
    thread.starts_with(ALL_VCPUS_THREAD)
}

/// Returns the vCPU number in the name of a thread, for sorting.
pub(crate) fn vcpu_number(thread: &str) -> Option<u32> {
    thread.strip_prefix(VCPU_THREAD)?.split('/').next()?.parse().ok()
}

/// Properties of a VM according to its command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QemuCommandLine {
    /// Name of the VM, if it has one.
    pub(crate) name: Option<String>,
    /// RAM at the start, in bytes; `None` if it is configured in another file.
    pub(crate) ram: Option<u64>,
    /// Upper bound of RAM in bytes, if more may have been plugged in since the start.
    pub(crate) ram_max: Option<u64>,
    /// Number of vCPUs at the start.
    pub(crate) vcpus: Option<u32>,
    /// All words of the command line, for searching paths in them.
    arguments: Vec<String>,
}

impl QemuCommandLine {
    /// Parses the words of a command line, which include the program's name.
    pub(crate) fn parse(raw_arguments: &[OsString]) -> Self {
        let arguments = split(raw_arguments.get(1..).unwrap_or_default());
        let option = |name: &str, implied| {
            let value = arguments.iter().rev().find_map(|argument: &Argument| argument.value_str_of(name));
            value.map(|text| KeyValues::parse(text, Some(implied)))
        };
        // A file read with `-readconfig` may set everything, and later options add to it.
        let has_config_file = arguments.iter().any(|argument| argument.name() == Some("readconfig"));
        let memory = option("m", "size");
        let size = |key: &str| memory.as_ref().and_then(|memory| parse_size(memory.get(key)?, MIB));
        let ram = match &memory {
            Some(memory) if memory.get("size").is_some() => size("size"),
            _ => (!has_config_file).then_some(RAM_DEFAULT),
        };
        Self {
            name: option("name", "guest").and_then(|name| name.get("guest").map(printable)),
            ram,
            ram_max: size("maxmem").filter(|max| ram.is_some_and(|ram| *max > ram)),
            vcpus: match option("smp", "cpus") {
                Some(smp) => vcpus(&smp),
                None => (!has_config_file).then_some(1),
            },
            arguments: raw_arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect(),
        }
    }

    /// Returns whether the command line contains this path or address.
    pub(crate) fn contains(&self, path: &str) -> bool {
        !path.is_empty() && self.arguments.iter().any(|argument| contains_whole(argument, path))
    }

    /// Returns whether the command line makes QEMU name its threads.
    pub(crate) fn names_threads(&self) -> bool {
        let mut arguments = self.arguments.iter();
        arguments.any(|argument| {
            let list = KeyValues::parse(argument, Some("guest"));
            list.get("debug-threads").and_then(parse_bool) == Some(true)
        })
    }
}

/// Returns whether `argument` contains `path`, and not as a part of a longer path.
fn contains_whole(argument: &str, path: &str) -> bool {
    argument.match_indices(path).any(|(at, _)| {
        let before = argument[..at].chars().next_back();
        let after = argument[at + path.len()..].chars().next();
        before.is_none_or(|before| "=,:\"".contains(before)) && after.is_none_or(|after| ",\"".contains(after))
    })
}

/// Returns `cpus`, or the product of the topology's parts; a part that is not given is 1.
fn vcpus(smp: &KeyValues) -> Option<u32> {
    let topology_part = |key: &str| smp.get(key).map(str::parse::<u32>);
    match topology_part("cpus") {
        Some(cpus) => cpus.ok(),
        None => ["drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads"]
            .iter()
            .filter_map(|key| topology_part(key))
            .try_fold(1_u32, |all, part| all.checked_mul(part.ok()?)),
    }
}

/// Replaces control characters, which could affect a terminal.
pub(crate) fn printable(text: &str) -> String {
    let fit = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().map(fit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command_line(line: &str) -> QemuCommandLine {
        let arguments: Vec<OsString> = line.split(' ').map(Into::into).collect();
        QemuCommandLine::parse(&arguments)
    }

    #[test]
    fn command_line_describes_vm() {
        let cases = [
            ("q -name web -m 4G -smp 4", (Some("web"), Some(4096 * MIB), Some(4))),
            ("q -name guest=web,debug-threads=on -m 512", (Some("web"), Some(512 * MIB), Some(1))),
            ("q -m size=2G,slots=4,maxmem=8G -smp sockets=2,cores=3,threads=2", (None, Some(2048 * MIB), Some(12))),
            ("q -m 1G -m 2G -smp 2,maxcpus=8", (None, Some(2048 * MIB), Some(2))),
            ("q -m 1G -smp cpus=3,sockets=3", (None, Some(1024 * MIB), Some(3))),
            ("q", (None, Some(128 * MIB), Some(1))),
            ("q -readconfig vm.cfg", (None, None, None)),
            ("q -m much -smp many", (None, None, None)),
            ("q -smp cores=100000,threads=100000", (None, Some(128 * MIB), None)),
        ];
        for (line, (name, ram, vcpus)) in cases {
            let it = command_line(line);
            assert_eq!((it.name.as_deref(), it.ram, it.vcpus), (name, ram, vcpus), "{line}");
        }
        assert_eq!(command_line("q -m 2G,maxmem=8G").ram_max, Some(8192 * MIB));
        assert_eq!(command_line("q -m 2G,maxmem=2G").ram_max, None);
        assert_eq!(command_line("q -name a\x1b[2Jb").name.as_deref(), Some("a\u{fffd}[2Jb"));
        assert!(command_line("q -name guest=a,debug-threads=on").names_threads());
        assert!(!command_line("q -name guest=a,debug-threads=off").names_threads());
    }

    #[test]
    fn vcpu_threads_are_recognised_by_name() {
        for name in ["CPU 0/KVM", "CPU 127/TCG", "ALL CPUs/TCG"] {
            assert!(is_vcpu(name), "{name}");
        }
        for name in ["CPU x/KVM", "CPU 0", "CPU", "qemu-system-x86", "IO iothread0", "vhost-1", "call_rcu"] {
            assert!(!is_vcpu(name), "{name}");
        }
        assert_eq!(vcpu_number("CPU 12/KVM"), Some(12));
    }

    #[test]
    fn only_whole_paths_are_found() {
        let it =
            command_line("q -chardev socket,id=c,path=/run/a.sock -drive file=nbd+unix:///x?socket=/run/b,if=virtio");
        assert!(it.contains("/run/a.sock") && it.contains("nbd+unix:///x?socket=/run/b"));
        assert!(!it.contains("/run/a") && !it.contains("a.sock") && !it.contains(""));
    }

    #[test]
    fn qemu_programs_are_recognised() {
        for name in ["qemu-system-x86_64", "qemu-system-aarch64", "qemu-kvm", "kvm"] {
            assert!(is_qemu(name), "{name}");
        }
        for name in ["qemu-img", "qemu-nbd", "sh", "qemu"] {
            assert!(!is_qemu(name), "{name}");
        }
    }
}
