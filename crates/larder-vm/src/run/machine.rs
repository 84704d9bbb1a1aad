//! Properties of the QEMU machine that the plan depends on: its virtio bus, its default kind of drive, its
//! processors.

use std::ffi::OsStr;
use std::path::Path;

use super::arguments::Argument;
use super::keyval::{KeyValues, parse_bool};

/// Bus of a plain virtio device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtioBus {
    /// PCI, on nearly all machines.
    Pci,
    /// Memory-mapped registers: microvm, and machines of the m68k family.
    Mmio,
    /// The channel subsystem of s390x, for which QEMU has no vhost-user-blk.
    Ccw,
}

/// The machine, derived from QEMU's program name and the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Architecture, from the program name `qemu-system-ARCHITECTURE`; `x86_64` for other names (`kvm`, `qemu-kvm`).
    architecture: String,
    /// Options of all `-machine` arguments, merged.
    options: KeyValues,
    /// Number of virtual processors at the start.
    pub processors: u64,
}

impl Machine {
    /// Parses the command line.
    pub fn parse(program: &OsStr, arguments: &[Argument]) -> Self {
        let program = Path::new(program).file_name().and_then(OsStr::to_str).unwrap_or_default();
        let architecture = program.strip_prefix("qemu-system-").unwrap_or("x86_64").to_owned();
        let mut options = KeyValues::default();
        let mut processors = 1;
        for argument in arguments {
            match (argument.name(), argument.value_str()) {
                (Some("machine" | "M"), Some(text)) => {
                    for (key, value) in KeyValues::parse(text, Some("type")).iter() {
                        options.set(key, value);
                    }
                }
                (Some("smp"), Some(text)) => processors = processor_count(&KeyValues::parse(text, Some("cpus"))),
                _ => {}
            }
        }
        Self { architecture, options, processors }
    }

    fn kind(&self) -> &str {
        self.options.get("type").unwrap_or_default()
    }

    /// Returns an option of `-machine`.
    pub fn option(&self, key: &str) -> Option<&str> {
        self.options.get(key)
    }

    /// Returns the bus of `virtio-blk`.
    pub fn virtio_bus(&self) -> VirtioBus {
        let microvm_without_pci = self.kind() == "microvm" && self.option("pcie").and_then(parse_bool) != Some(true);
        match self.architecture.as_str() {
            "s390x" => VirtioBus::Ccw,
            "m68k" => VirtioBus::Mmio,
            _ if microvm_without_pci => VirtioBus::Mmio,
            _ => VirtioBus::Pci,
        }
    }

    /// Returns whether a `-drive` without `if=` is a virtio disk.
    pub fn drives_are_virtio(&self) -> bool {
        let virt = self.kind() == "virt" || self.kind().starts_with("virt-");
        self.architecture == "s390x" || (virt && self.architecture != "m68k")
    }

    /// Returns the guest's RAM in bytes without `-m`; `None` if it depends on the machine in a way that Larder does
    /// not know.
    pub fn default_ram_bytes(&self) -> Option<u64> {
        // QEMU's own default, which PCs and the virt machines do not change.
        let has_common_default =
            matches!(self.architecture.as_str(), "x86_64" | "i386" | "aarch64" | "arm" | "riscv64" | "riscv32");
        has_common_default.then_some(128 << 20)
    }
}

/// Returns the number of processors from `-smp`: `cpus=`, or the product of the topology.
fn processor_count(smp: &KeyValues) -> u64 {
    let number = |key| smp.get(key).and_then(|text| text.parse::<u64>().ok());
    let topology = ["drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads"];
    let product = topology.into_iter().filter_map(number).fold(1, u64::saturating_mul);
    number("cpus").unwrap_or(product)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::arguments::split;

    fn machine(line: &str) -> Machine {
        let mut words = line.split_whitespace().map(Into::into).collect::<Vec<std::ffi::OsString>>();
        let program = words.remove(0);
        Machine::parse(&program, &split(&words))
    }

    #[test]
    fn virtio_bus_depends_on_machine() {
        assert_eq!(machine("qemu-system-x86_64").virtio_bus(), VirtioBus::Pci);
        assert_eq!(machine("kvm -M q35").virtio_bus(), VirtioBus::Pci);
        assert_eq!(machine("/usr/bin/qemu-system-x86_64 -M microvm,rtc=on").virtio_bus(), VirtioBus::Mmio);
        assert_eq!(machine("qemu-system-x86_64 -machine microvm -M pcie=on").virtio_bus(), VirtioBus::Pci);
        assert_eq!(machine("qemu-system-s390x").virtio_bus(), VirtioBus::Ccw);
    }

    #[test]
    fn default_drive_interface_matches_qemu() {
        assert!(!machine("qemu-system-x86_64 -M q35").drives_are_virtio());
        assert!(machine("qemu-system-aarch64 -M virt,gic-version=3").drives_are_virtio());
        assert!(machine("qemu-system-riscv64 -M virt").drives_are_virtio());
        assert!(!machine("qemu-system-aarch64 -M raspi3b").drives_are_virtio());
    }

    #[test]
    fn processors_are_counted() {
        assert_eq!(machine("kvm").processors, 1);
        assert_eq!(machine("kvm -smp 8,maxcpus=16").processors, 8);
        assert_eq!(machine("kvm -smp cpus=3").processors, 3);
        assert_eq!(machine("kvm -smp sockets=2,cores=4,threads=2").processors, 16);
        assert_eq!(machine("kvm -smp many").processors, 1);
    }
}
