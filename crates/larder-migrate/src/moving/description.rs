//! Description of a QEMU and its VM, with the properties that must match on both hosts.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// Properties of a QEMU and its VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Description {
    /// QEMU's version: major, minor, micro.
    pub qemu: [u64; 3],
    /// Machine type, such as `pc-i440fx-7.2`.
    pub machine: String,
    /// Bytes of RAM: at the start, and plugged in as DIMMs since.
    pub memory_bytes: [u64; 2],
    /// List of virtio-mem devices.
    pub virtio_mem: Vec<VirtioMem>,
    /// Number of virtual processors present.
    pub processors: u64,
    /// Model and features of the processors.
    pub processor: Option<Processor>,
    /// PCI devices: address, vendor and device.
    pub pci: Vec<String>,
    /// UUID in QEMU; zeros without `-uuid`.
    pub uuid: String,
    /// Name in QEMU.
    pub name: Option<String>,
    /// Time of the host's clock, in milliseconds since 1970.
    pub clock_ms: u64,
    /// Bytes of memory available on the host.
    pub available_bytes: Option<u64>,
}

/// State of a virtio-mem device. The guest plugs and unplugs its memory itself, and the destination gets the plugged
/// size from the migration stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VirtioMem {
    /// Name of the device in QEMU; empty without `id=`.
    pub id: String,
    /// Bytes that are plugged.
    pub plugged_bytes: u64,
    /// Bytes that can be plugged: the size of its memory backend.
    pub bytes_max: u64,
}

/// Properties of a processor that are visible to a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Processor {
    /// QEMU's type, such as `Nehalem-x86_64-cpu`.
    pub model: String,
    /// Vendor in CPUID, such as `GenuineIntel`; empty where there is no CPUID.
    pub vendor: String,
    /// Words of CPUID that are not zero: the name of each, such as `80000001h ECX`, and its bits.
    pub features: BTreeMap<String, u64>,
}

/// Maximum difference of the hosts' clocks; a larger one makes the guest's time jump. The transfer time of a
/// description looks like a difference.
const CLOCK_SKEW_MS_MAX: u64 = 1000;

impl Description {
    /// Queries QEMU for its description.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn query(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let no_arguments = || json!({});
        let machine = qmp.execute("qom-get", json!({"path": "/machine", "property": "type"}))?;
        let machine = machine.as_str().unwrap_or("unknown").trim_end_matches("-machine").to_owned();
        let memory = qmp.execute("query-memory-size-summary", no_arguments())?;
        let virtio_mem = VirtioMem::parse_list(&qmp.execute("query-memory-devices", no_arguments())?);
        let virtio_mem_bytes: u64 = virtio_mem.iter().map(|device| device.plugged_bytes).sum();
        let [base, plugged] = ["base-memory", "plugged-memory"].map(|part| memory[part].as_u64().unwrap_or(0));
        let processors = qmp.execute("query-cpus-fast", no_arguments())?;
        let processor = Processor::query(qmp, &processors[0])?;
        let pci = qmp.execute("query-pci", no_arguments())?;
        let uuid = qmp.execute("query-uuid", no_arguments())?;
        let name = qmp.execute("query-name", no_arguments())?;
        Ok(Self {
            qemu: qmp.version(),
            machine,
            memory_bytes: [base, plugged.saturating_sub(virtio_mem_bytes)],
            virtio_mem,
            processors: processors.as_array().map_or(0, Vec::len) as u64,
            processor,
            pci: pci_devices(&pci),
            uuid: uuid["UUID"].as_str().unwrap_or_default().to_owned(),
            name: name["name"].as_str().map(str::to_owned),
            clock_ms: clock_ms(),
            available_bytes: available_memory(),
        })
    }

    /// Returns the differences that prevent a VM of this description from becoming one of `there`.
    #[must_use]
    pub fn differences(&self, there: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let mut differ = |what: &str, here: &dyn std::fmt::Display, there: &dyn std::fmt::Display| {
            found.push(format!("{what}: {here} at the source, {there} at the destination"));
        };
        if self.uuid != there.uuid {
            differ("UUID (-uuid)", &self.uuid, &there.uuid);
        }
        if self.machine != there.machine {
            differ("machine type", &self.machine, &there.machine);
        }
        if self.memory_bytes[0] != there.memory_bytes[0] {
            differ("bytes of memory (-m)", &self.memory_bytes[0], &there.memory_bytes[0]);
        }
        if self.memory_bytes[1] != there.memory_bytes[1] {
            differ("bytes of memory plugged in", &self.memory_bytes[1], &there.memory_bytes[1]);
        }
        let text = |devices: &[VirtioMem]| match devices {
            [] => "none".to_owned(),
            devices => devices.iter().map(VirtioMem::text).collect::<Vec<_>>().join(", "),
        };
        let (devices, devices_there) = (text(&self.virtio_mem), text(&there.virtio_mem));
        if devices != devices_there {
            differ("virtio-mem devices", &devices, &devices_there);
        }
        if self.processors != there.processors {
            differ("processors (-smp)", &self.processors, &there.processors);
        }
        if let (Some(here), Some(there)) = (&self.processor, &there.processor) {
            let missing = here.missing(there);
            if !missing.is_empty() {
                found.push(format!(
                    "processor model (-cpu): {} at the source, {} at the destination, which lacks features that the guest may use: \
                     CPUID {}",
                    here.model,
                    there.model,
                    missing.join(", ")
                ));
            }
        }
        for (devices, others, side) in [(&self.pci, &there.pci, "destination"), (&there.pci, &self.pci, "source")] {
            for device in devices.iter().filter(|device| !others.contains(device)) {
                found.push(format!("PCI device {device} is missing at the {side}"));
            }
        }
        found
    }

    /// Returns problems that do not prevent the move.
    #[must_use]
    pub fn warnings(&self, there: &Self) -> Vec<String> {
        let mut found = Vec::new();
        if self.qemu > there.qemu {
            let text = |version: [u64; 3]| version.map(|part| part.to_string()).join(".");
            found.push(format!(
                "QEMU {} at the destination is older than {} at the source",
                text(there.qemu),
                text(self.qemu)
            ));
        }
        if let (Some(here), Some(there)) = (&self.processor, &there.processor)
            && (&here.model, &here.vendor) != (&there.model, &there.vendor)
        {
            found.push(format!(
                "the processor models differ (-cpu), which the guest may notice: {here} at the source, {there} at \
                 the destination"
            ));
        }
        let skew_ms = self.clock_ms.abs_diff(there.clock_ms);
        if skew_ms > CLOCK_SKEW_MS_MAX {
            found.push(format!(
                "the hosts' clocks differ by {:.1} s, so the guest's clock will jump: synchronise them by NTP",
                skew_ms as f64 / 1000.0
            ));
        }
        let plugged = self.virtio_mem.iter().map(|device| device.plugged_bytes);
        let needed: u64 = self.memory_bytes.into_iter().chain(plugged).sum();
        if let Some(available) = there.available_bytes.filter(|&left| left < needed) {
            found.push(format!(
                "the destination has {} MiB of available memory, and the guest needs {} MiB",
                available >> 20,
                needed >> 20
            ));
        }
        found
    }
}

impl VirtioMem {
    /// Finds the devices among QEMU's memory devices (`query-memory-devices`), in a fixed order.
    fn parse_list(devices: &Value) -> Vec<Self> {
        let entries = devices.as_array().into_iter().flatten();
        let mut found: Vec<Self> = entries
            .filter(|device| device["type"] == "virtio-mem")
            .map(|device| {
                let number = |name: &str| device["data"][name].as_u64().unwrap_or(0);
                Self {
                    id: device["data"]["id"].as_str().unwrap_or_default().to_owned(),
                    plugged_bytes: number("size"),
                    bytes_max: number("max-size"),
                }
            })
            .collect();
        found.sort_by(|one, other| (&one.id, one.bytes_max).cmp(&(&other.id, other.bytes_max)));
        found
    }

    /// Returns the properties that must be alike on both hosts.
    fn text(&self) -> String {
        let name = if self.id.is_empty() { "without id" } else { &self.id };
        format!("{name} of {} bytes", self.bytes_max)
    }
}

impl Processor {
    /// Queries the properties of a processor in QEMU's list.
    fn query(qmp: &mut Qmp, listed: &Value) -> Result<Option<Self>, QmpError> {
        let Some(path) = listed["qom-path"].as_str() else {
            return Ok(None);
        };
        // QEMU refuses properties that other architectures lack.
        let mut property = |name: &str| match qmp.execute("qom-get", json!({"path": path, "property": name})) {
            Err(QmpError::Refused { .. }) => Ok(Value::Null),
            answer => answer,
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let words = property("feature-words")?;
        let words = words.as_array().into_iter().flatten();
        Ok(Some(Self {
            model: text(&property("type")?),
            vendor: text(&property("vendor")?),
            features: words.filter_map(feature_word).collect(),
        }))
    }

    /// Returns the words with the bits that `there` lacks and that a guest may use here.
    fn missing(&self, there: &Self) -> Vec<String> {
        let words = self.features.iter().filter_map(|(word, bits)| {
            let lacks = bits & !there.features.get(word).unwrap_or(&0);
            (lacks != 0).then(|| format!("{word} {lacks:#x}"))
        });
        words.collect()
    }
}

impl std::fmt::Display for Processor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.model)?;
        match self.vendor.is_empty() {
            true => Ok(()),
            false => write!(f, " ({})", self.vendor),
        }
    }
}

/// Returns a word of CPUID with its name, if any bit is set.
fn feature_word(word: &Value) -> Option<(String, u64)> {
    let bits = word["features"].as_u64().filter(|&bits| bits != 0)?;
    let leaf = word["cpuid-input-eax"].as_u64()?;
    let below = word["cpuid-input-ecx"].as_u64().map_or_else(String::new, |below| format!(".{below}"));
    let register = word["cpuid-register"].as_str()?;
    Some((format!("{leaf:x}h{below} {register}"), bits))
}

/// Returns the address, vendor and device of each device, including those behind bridges.
fn pci_devices(buses: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let mut buses: Vec<&Value> = buses.as_array().into_iter().flatten().collect();
    while let Some(bus) = buses.pop() {
        for device in bus["devices"].as_array().into_iter().flatten() {
            let number = |value: &Value| value.as_u64().unwrap_or(0);
            found.push(format!(
                "{:02x}:{:02x}.{:x} {:04x}:{:04x}",
                number(&device["bus"]),
                number(&device["slot"]),
                number(&device["function"]),
                number(&device["id"]["vendor"]),
                number(&device["id"]["device"])
            ));
            buses.push(&device["pci_bridge"]);
        }
    }
    found.sort();
    found
}

/// Returns this host's clock, in milliseconds since 1970.
pub(super) fn clock_ms() -> u64 {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    clock.as_millis() as u64
}

/// Returns the bytes of memory available on this host (proc(5), `MemAvailable`).
#[must_use]
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns devices as QEMU 7.2 lists them: a DIMM, and two virtio-mem devices, one without a name.
    fn devices(plugged: u64) -> Value {
        let virtio_mem = |id: Option<&str>, size: u64, max: u64| {
            let mut data = json!({"size": size, "max-size": max, "requested-size": size, "block-size": 2 << 20});
            if let Some(id) = id {
                data["id"] = id.into();
            }
            json!({"type": "virtio-mem", "data": data})
        };
        json!([
            {"type": "dimm", "data": {"size": 64 << 20, "id": "dimm0"}},
            virtio_mem(Some("vm0"), plugged, 512 << 20),
            virtio_mem(None, 0, 1 << 30),
        ])
    }

    /// Only the maximum size must match: the plugged size comes with the stream.
    #[test]
    fn virtio_mem_devices_compare_by_maximum() {
        let here = VirtioMem::parse_list(&devices(256 << 20));
        let there = VirtioMem::parse_list(&devices(0));
        let text = |devices: &[VirtioMem]| devices.iter().map(VirtioMem::text).collect::<Vec<_>>();
        assert_eq!(text(&here), ["without id of 1073741824 bytes", "vm0 of 536870912 bytes"]);
        assert_eq!(text(&here), text(&there));
        assert_eq!(here[1].plugged_bytes, 256 << 20);
        assert_ne!(text(&here), text(&here[..1]));
        assert!(VirtioMem::parse_list(&json!(null)).is_empty());
    }
}
