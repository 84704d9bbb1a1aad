//! One disk of a domain: whether Larder can serve it, and with which options.
//!
//! All of the disk's XML is examined. An element that libvirt refuses on a vhost-user disk becomes a key of the VM's
//! file. An option of how QEMU accesses the image, which Larder does in its own way, is dropped. An option whose
//! effect would be lost keeps the disk with QEMU, and so does an unknown one, which might matter.

use super::target;
use super::xml::{Edits, Element, quote};
use crate::image::{Format, ImageAddress, NamedImage, toml_string};
use crate::limits::LimitName;
use larder_export::vhost_user::{QUEUES_MAX, Serial};

/// A disk that Larder is to serve.
#[derive(Debug, Clone)]
pub struct ServedDisk {
    /// Name of the disk in the guest: `vda`.
    pub name: String,
    /// The image, in the notation of the VM's file.
    pub image: String,
    /// Further keys of the VM's file, with values in TOML syntax.
    pub keys: Vec<(&'static str, String)>,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Backing files that the domain names, the next one first; `None` if the domain does not name them.
    pub backing: Option<Vec<NamedImage>>,
}

/// Converts a disk.
///
/// # Errors
/// Larder cannot serve the disk as it is; the reason, worded to follow the disk's name.
pub(super) fn parse_disk(disk: &Element) -> Result<ServedDisk, String> {
    match disk.attribute("device").unwrap_or("disk") {
        "disk" => {}
        "cdrom" => return Err("a CD-ROM drive; Larder serves virtio disks".to_owned()),
        other => return Err(format!("its device is a {other}; Larder serves virtio disks")),
    }
    let bus = disk.child("target").and_then(|target| target.attribute("bus"));
    if bus != Some("virtio") {
        let bus = bus.unwrap_or("default");
        return Err(format!("it is on the {bus} bus; Larder serves virtio disks"));
    }
    for (key, value) in &disk.attributes {
        match key.as_str() {
            "type" | "device" | "model" | "snapshot" => {}
            _ => return Err(format!("it has {key}='{value}', which Larder does not support")),
        }
    }
    let mut served = ServedDisk {
        name: target(disk).ok_or("it has no name: <target dev=...>")?.to_owned(),
        image: image_address(disk)?,
        keys: Vec::new(),
        notes: Vec::new(),
        backing: None,
    };
    parse_driver(disk, &mut served)?;
    for child in &disk.children {
        match child.name.as_str() {
            "driver" | "source" | "boot" | "alias" | "address" => {}
            "target" => {
                let other = child.attributes.iter().find(|(key, _)| key != "dev" && key != "bus");
                if let Some((key, value)) = other {
                    return Err(format!("its target has {key}='{value}', which Larder does not support"));
                }
            }
            "serial" => {
                served.notes.extend(Serial::truncation_warning(&child.text));
                served.keys.push(("serial", toml_string(&child.text)));
            }
            "readonly" => served.keys.push(("readonly", "true".to_owned())),
            "iotune" => parse_iotune(child, &mut served)?,
            "blockio" => parse_blockio(child, &mut served)?,
            "backingStore" => served.backing = Some(parse_backing_chain(child)?),
            "shareable" => {
                return Err("it is shareable: other hosts may write to it, which Larder would not notice".to_owned());
            }
            "transient" => return Err("it is transient: the guest's writes are to be discarded".to_owned()),
            "encryption" => return Err("it is encrypted, which only QEMU can read".to_owned()),
            "mirror" => return Err("it is being mirrored; wait until that has ended".to_owned()),
            other => return Err(format!("it has <{other}>, which Larder does not support")),
        }
    }
    Ok(served)
}

/// Returns the address of the image.
fn image_address(disk: &Element) -> Result<String, String> {
    let kind = disk.attribute("type").unwrap_or("file");
    if kind == "vhostuser" {
        return Err("another process serves it already".to_owned());
    }
    let source = disk.child("source").ok_or("it is empty: it has no <source>")?;
    if let Some(child) = source.children.iter().find(|child| match child.name.as_str() {
        // Larder needs no label, and relabels nothing.
        "seclabel" => false,
        "host" => kind != "network",
        _ => true,
    }) {
        let hint = match child.name.as_str() {
            "encryption" | "auth" => "which only QEMU can use",
            "slices" => "a part of an image, and Larder serves only whole images",
            _ => "which Larder does not support",
        };
        return Err(format!("its source has <{}>, {hint}", child.name));
    }
    let known: &[&str] = match kind {
        "file" => &["file", "index"],
        "block" => &["dev", "index"],
        "network" => &["protocol", "name", "tls", "index"],
        _ => {
            return Err(format!("its type is '{kind}'; Larder serves files, block devices and NBD exports"));
        }
    };
    for (key, value) in &source.attributes {
        match (key.as_str(), value.as_str()) {
            ("startupPolicy", "mandatory") | ("tls", "no") => {}
            ("tls", _) => {
                return Err("it is an NBD export over TLS: write a VM's file by hand, with nbds:// and the directory of its certificates".to_owned());
            }
            (key, _) if known.contains(&key) => {}
            (key, value) => return Err(format!("its source has {key}='{value}', which Larder does not support")),
        }
    }
    let path = match kind {
        "file" => source.attribute("file"),
        "block" => source.attribute("dev"),
        _ => return nbd_uri(source),
    };
    let path = path.ok_or("its <source> names no image")?;
    match path.starts_with('/') {
        true => Ok(path.to_owned()),
        false => Err(format!("'{path}' is not an absolute path")),
    }
}

fn nbd_uri(source: &Element) -> Result<String, String> {
    if source.attribute("protocol") != Some("nbd") {
        let protocol = source.attribute("protocol").unwrap_or("unknown");
        return Err(format!("its protocol is {protocol}; the only network protocol that Larder supports is NBD"));
    }
    let hosts: Vec<&Element> = source.children_named("host").collect();
    let [host] = hosts.as_slice() else {
        return Err(format!("it has {} hosts, and an NBD export has one", hosts.len()));
    };
    let export = percent_encode(source.attribute("name").unwrap_or_default());
    let text = match host.attribute("transport").unwrap_or("tcp") {
        "unix" => {
            let socket = host.attribute("socket").ok_or("its host has no socket")?;
            format!("nbd+unix:///{export}?socket={}", percent_encode(socket))
        }
        "tcp" => {
            let name = host.attribute("name").ok_or("its host has no name")?;
            let name = match name.contains(':') && !name.starts_with('[') {
                true => format!("[{name}]"),
                false => name.to_owned(),
            };
            let port = host.attribute("port").map_or(String::new(), |port| format!(":{port}"));
            format!("nbd://{name}{port}/{export}")
        }
        other => {
            return Err(format!("its host has the transport {other}; Larder supports tcp and unix"));
        }
    };
    match text.parse() {
        Ok(ImageAddress::Nbd(_)) => Ok(text),
        Ok(ImageAddress::Path(_)) => Err(format!("{text} is not an NBD URI")),
        Err(error) => Err(error.to_string()),
    }
}

/// Escapes a part of a URI.
fn percent_encode(part: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let letters = part.bytes().map(|byte| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    });
    letters.collect()
}

/// Converts `<driver>`.
fn parse_driver(disk: &Element, served: &mut ServedDisk) -> Result<(), String> {
    let empty = Element::default();
    let driver = disk.child("driver").unwrap_or(&empty);
    let mut discard = "ignore";
    let mut format = "raw";
    for (key, value) in &driver.attributes {
        let unsupported = |why: &str| Err(format!("{key}='{value}': {why}"));
        match (key.as_str(), value.as_str()) {
            ("name", "qemu") => {}
            ("type", "raw") => {}
            ("type", "qcow2") => format = "qcow2",
            ("type", _) => return unsupported("Larder reads raw and qcow2 images"),
            // Queues belong to the front-end, which QEMU still provides; it must not use more queues than the server
            // offers.
            ("queues", queues) if !queues.parse().is_ok_and(|queues: u16| (1..=QUEUES_MAX).contains(&queues)) => {
                return unsupported(&format!("a disk of Larder's has 1 to {QUEUES_MAX} queues"));
            }
            ("queues" | "packed" | "page_per_vq" | "event_idx", _) => {}
            ("queue_size", size) => {
                let number = size.parse::<u64>().ok().map(|number| number.to_string());
                served.keys.push(("queue-size", number.unwrap_or_else(|| toml_string(size))));
            }
            ("cache", "none" | "default") => {}
            ("cache", "writeback") => served.keys.push(("cache", toml_string("buffered"))),
            ("cache", "writethrough" | "directsync") => {
                return unsupported(
                    "it makes each write durable when it completes, and Larder makes writes durable when the guest flushes; remove it with virsh edit if the guest flushes",
                );
            }
            ("cache", "unsafe") => {
                return unsupported(
                    "Larder always makes flushes durable; remove it with virsh edit if that is acceptable",
                );
            }
            ("discard", "unmap") => discard = "unmap",
            ("discard", "ignore") => {}
            ("io", _) | ("ioeventfd", _) => {}
            ("iothread", _) => served
                .notes
                .push(format!("iothread {value} no longer serves it: Larder gives each disk a thread of its own")),
            ("detect_zeroes" | "copy_on_read" | "iommu" | "ats" | "discard_no_unref", "off") => {}
            ("error_policy" | "rerror_policy", "report") => {}
            ("error_policy" | "rerror_policy", _) => {
                return unsupported(
                    "Larder reports errors to the guest, and cannot stop it; remove it with virsh edit if that is acceptable",
                );
            }
            _ => return unsupported("Larder does not support this"),
        }
    }
    served.keys.push(("format", toml_string(format)));
    // QEMU's default differs from Larder's.
    served.keys.push(("discard", toml_string(discard)));
    for child in &driver.children {
        match child.name.as_str() {
            "metadata_cache" => served.notes.push(
                "its metadata_cache is dropped: Larder's is as large as the disk needs, up to 256 MiB".to_owned(),
            ),
            "iothreads" => served
                .notes
                .push("its iothreads no longer serve it: Larder gives each disk a thread of its own".to_owned()),
            other => return Err(format!("its driver has <{other}>, which Larder does not support")),
        }
    }
    Ok(())
}

fn parse_iotune(iotune: &Element, served: &mut ServedDisk) -> Result<(), String> {
    for limit in &iotune.children {
        match (limit.name.as_str(), LimitName::find(&limit.name)) {
            ("group_name", _) => {
                return Err(format!(
                    "its iotune applies to the group '{}', and each of Larder's limits applies to one disk",
                    limit.text
                ));
            }
            (_, Some(row)) => match limit.text.parse::<u64>() {
                Ok(0) => {}
                Ok(value) => served.keys.push((row.name, value.to_string())),
                Err(_) => {
                    return Err(format!("its iotune has {} '{}', which is not a number", limit.name, limit.text));
                }
            },
            (name, None) => return Err(format!("its iotune has <{name}>, which Larder does not support")),
        }
    }
    Ok(())
}

fn parse_blockio(blockio: &Element, served: &mut ServedDisk) -> Result<(), String> {
    for (key, value) in &blockio.attributes {
        match (key.as_str(), value.as_str()) {
            ("logical_block_size", "0" | "512") => {}
            ("logical_block_size", "4096") => served.keys.push(("block-size", value.clone())),
            ("logical_block_size", _) => return Err(format!("its {key} is {value}; Larder supports 512 and 4096")),
            // These are hints, which do not affect a guest's data.
            ("physical_block_size" | "discard_granularity", _) => served.notes.push(format!("its {key} is dropped")),
            _ => {
                return Err(format!("its blockio has {key}='{value}', which Larder does not support"));
            }
        }
    }
    Ok(())
}

/// Returns the files that nested `<backingStore>` elements name.
fn parse_backing_chain(store: &Element) -> Result<Vec<NamedImage>, String> {
    let (mut files, mut next) = (Vec::new(), Some(store));
    while let Some(store) = next {
        let Some(source) = store.child("source") else { break };
        let path = match store.attribute("type") {
            Some("file") => source.attribute("file"),
            Some("block") => source.attribute("dev"),
            _ => None,
        };
        let format = store.child("format").and_then(|format| format.attribute("type"));
        let format = match format.map(|name| (name, Format::from_driver(name))) {
            None => None,
            Some((_, Some(format))) => Some(format),
            Some((name, None)) => {
                return Err(format!("its backingStore has the format '{name}'; Larder reads raw and qcow2 images"));
            }
        };
        match path {
            Some(path) if source.children.iter().all(|child| child.name == "seclabel") => {
                files.push(NamedImage { image: ImageAddress::Path(path.into()), format, data_file: None })
            }
            _ => {
                return Err(
                    "its backingStore is not a plain file or block device; name the files in a VM's file by hand"
                        .to_owned(),
                );
            }
        }
        next = store.child("backingStore");
    }
    Ok(files)
}

/// Returns the number of queues for a disk that gives none, if one is needed: QEMU uses one queue per processor, and
/// exits if the server offers fewer.
pub(super) fn required_queues(domain: &Element) -> Option<u16> {
    let vcpu = domain.child("vcpu")?;
    let processors = vcpu.attribute("current").unwrap_or(&vcpu.text);
    let fits = processors.trim().parse().is_ok_and(|processors: u16| processors <= QUEUES_MAX);
    (!fits).then_some(QUEUES_MAX)
}

/// Changes the disk to one that is served on `socket`.
///
/// `queues` is the number of queues for a disk that gives none.
pub(super) fn rewrite(text: &str, disk: &Element, socket: &str, queues: Option<u16>, edits: &mut Edits) {
    let mut tag = String::from("<disk type='vhostuser'");
    for (key, value) in &disk.attributes {
        if key != "type" && key != "snapshot" {
            tag.push_str(&format!(" {key}={}", quote(value)));
        }
    }
    edits.replace(disk.tag.clone(), tag + ">");
    let mut driver = String::from("<driver name='qemu' type='raw'");
    let old = disk.child("driver");
    for (key, value) in old.map_or(&[][..], |driver| &driver.attributes) {
        if matches!(key.as_str(), "queues" | "queue_size" | "packed" | "page_per_vq" | "event_idx") {
            driver.push_str(&format!(" {key}={}", quote(value)));
        }
    }
    let has_queues = old.is_some_and(|driver| driver.attribute("queues").is_some());
    if let Some(queues) = queues.filter(|_| !has_queues) {
        driver.push_str(&format!(" queues='{queues}'"));
    }
    driver.push_str("/>");
    let source =
        format!("<source type='unix' path={}>\n  <reconnect enabled='yes' timeout='1'/>\n</source>", quote(socket));
    for child in &disk.children {
        match child.name.as_str() {
            "driver" => edits.replace(child.span.clone(), driver.clone()),
            "source" => {
                let indentation = super::xml::indentation(text, child);
                let lines = source.replace('\n', &format!("\n{indentation}"));
                // libvirt accepts the elements in any order.
                let lines = match old {
                    Some(_) => lines,
                    None => format!("{driver}\n{indentation}{lines}"),
                };
                edits.replace(child.span.clone(), lines);
            }
            "iotune" | "serial" | "readonly" | "blockio" | "backingStore" => edits.remove(text, child),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(attributes: &str, inner: &str) -> Result<ServedDisk, String> {
        let text = format!("<disk {attributes}>{inner}<target dev='vda' bus='virtio'/></disk>");
        parse_disk(&Element::parse(&text).expect("is XML"))
    }

    fn nbd(source: &str) -> Result<String, String> {
        let source = format!("<source protocol='nbd' {source}</source>");
        disk("type='network'", &source).map(|disk| disk.image)
    }

    #[test]
    fn nbd_exports_become_uris() {
        for (source, uri) in [
            ("name='web'><host name='store' port='10810'/>", "nbd://store:10810/web"),
            (">\n<host name='::1'/>", "nbd://[::1]/"),
            ("name='a b'><host transport='unix' socket='/run/n s'/>", "nbd+unix:///a%20b?socket=/run/n%20s"),
        ] {
            assert_eq!(nbd(source).as_deref(), Ok(uri));
        }
        for source in [
            "name='x'>",
            "><host name='a'/><host name='b'/>",
            "tls='yes'><host name='a'/>",
            "><host name='a' transport='rdma'/>",
        ] {
            assert!(nbd(source).is_err(), "{source}");
        }
    }

    #[test]
    fn unknown_or_unsupported_xml_is_refused() {
        let source = "<source file='/a'/>";
        assert!(disk("type='file'", source).is_ok());
        for (attributes, inner) in [
            ("type='file' rawio='yes'", source),
            ("type='file' device='lun'", source),
            ("type='file'", ""),
            ("type='file'", "<source/>"),
            ("type='file'", "<source file='a'/>"),
            ("type='file'", "<source file='/a' startupPolicy='optional'/>"),
            ("type='file'", "<source file='/a'><slices/></source>"),
            ("type='volume'", "<source pool='p' volume='v'/>"),
            ("type='nvme'", "<source/>"),
            ("type='network'", "<source protocol='rbd' name='p/v'/>"),
        ] {
            assert!(disk(attributes, inner).is_err(), "{attributes} {inner}");
        }
        for other in [
            "<driver name='tap'/>",
            "<driver type='vmdk'/>",
            "<driver copy_on_read='on'/>",
            "<driver detect_zeroes='unmap'/>",
            "<driver iommu='on'/>",
            "<driver error_policy='stop'/>",
            "<driver cache='unsafe'/>",
            "<driver new='x'/>",
            "<driver><new/></driver>",
            "<iotune><group_name>x</group_name></iotune>",
            "<iotune><new>1</new></iotune>",
            "<iotune><total_iops_sec>x</total_iops_sec></iotune>",
            "<blockio logical_block_size='1024'/>",
            "<shareable/>",
            "<transient/>",
            "<encryption/>",
            "<wwn>5000c500155668dd</wwn>",
            "<geometry/>",
            "<new/>",
            "<backingStore type='network'><source protocol='nbd'/></backingStore>",
        ] {
            assert!(disk("type='file'", &format!("{source}{other}")).is_err(), "{other}");
        }
    }

    #[test]
    fn backing_files_keep_chain_order() {
        let inner = "<source file='/c'/><backingStore type='file'><format type='qcow2'/><source file='/b'/><backingStore type='block'><format type='raw'/><source dev='/dev/a'/><backingStore/></backingStore></backingStore>";
        let found = disk("type='file'", inner).expect("can be served").backing;
        let named = |path: &str, format| NamedImage {
            image: ImageAddress::Path(path.into()),
            format: Some(format),
            data_file: None,
        };
        let all = vec![named("/b", Format::Qcow2), named("/dev/a", Format::Raw)];
        assert_eq!(found, Some(all));
        let found = disk("type='file'", "<source file='/c'/><backingStore/>");
        assert_eq!(found.expect("can be served").backing, Some(Vec::new()));
    }
}
