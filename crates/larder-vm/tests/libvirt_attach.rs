//! Tests of the plan of `larder libvirt attach`: `larder vm` can read every file that it produces.

use std::path::{Path, PathBuf};

use larder_export::vhost_user::QUEUES_MAX;
use larder_vm::libvirt::attach::{AttachOptions, DomainAttachError, plan};
use larder_vm::libvirt::xml::Element;
use larder_vm::listen::SOCKET_PATH_BYTES_MAX;
use larder_vm::vm::config::VmConfig;
use proptest::prelude::*;

/// Generates an attribute or an element of a disk, which is absent half of the time.
fn part(key: &'static str, values: &'static str) -> impl Strategy<Value = String> {
    prop::option::of(values).prop_map(move |value| match (value, key.strip_prefix('<')) {
        (None, _) => String::new(),
        (Some(value), None) => format!(" {key}='{value}'"),
        (Some(value), Some(element)) => format!("<{element}>{value}</{element}>"),
    })
}

fn disk() -> impl Strategy<Value = String> {
    let number = "[0-9]{1,6}|0x[0-9]{2}|64|65|128|256|1024|2048|[a-z ]{0,3}";
    let driver = (part("queues", number), part("queue_size", number), part("cache", "none|writeback|unsafe"));
    let more = (
        part("<serial", "[ -%(-;=?-~]{0,40}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
        part("<total_iops_sec", "[0-9]{1,20}"),
        part("<total_iops_sec_max", "[0-9]{1,20}"),
        part("logical_block_size", "512|1024|4096|[0-9]{1,5}"),
    );
    ("[a-z]{1,60}", "[a-z/ .%&;]{1,20}", driver, more).prop_map(|(name, file, driver, more)| {
        let (queues, size, cache) = driver;
        let (serial, limit, burst, sectors) = more;
        let file = file.replace('&', "&amp;");
        format!(
            "<disk type='file' device='disk'><driver name='qemu' type='raw'{queues}{size}{cache}/><source file='/{file}'/>\
             <target dev='{name}' bus='virtio'/>{}<iotune>{limit}{burst}</iotune><blockio{sectors}/></disk>",
            serial.replace('&', "&amp;")
        )
    })
}

proptest! {
    #[test]
    fn attached_disk_has_valid_vm_file(
        disks in prop::collection::vec(disk(), 1..4),
        processors in prop::sample::select(vec![1_u16, 64, 65, 400]),
        name in "[a-z]{1,12}|[a-z]{70,110}",
    ) {
        // libvirt does not allow two disks with the same name.
        let disks = disks.into_iter().enumerate();
        let disks: Vec<String> = disks.map(|(number, disk)| disk.replace("dev='", &format!("dev='v{number}"))).collect();
        let xml = format!(
            "<domain type='kvm'><name>{name}</name><uuid>2c9d6f3e-8c54-4d6a-9c0e-5f2b6c1d7a10</uuid>\
             <vcpu>{processors}</vcpu><devices>{}</devices></domain>",
            disks.concat()
        );
        let path = PathBuf::from(format!("/etc/larder/vms/{name}.toml"));
        let planned = plan(&xml, &AttachOptions::default(), |_| Ok(path.clone()));
        let planned = match planned {
            Ok(planned) => planned,
            Err(DomainAttachError::NoServableDisk { .. }) => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        let config = VmConfig::parse(Path::new(&path), &planned.file).expect("what was written is right");
        prop_assert_eq!(config.disks.len(), planned.served.len());
        for disk in &config.disks {
            prop_assert_eq!(disk.spec.check(), Ok(()));
            prop_assert!(disk.spec.image_options().is_ok());
            let socket = disk.socket.as_ref().expect("a socket");
            prop_assert!(socket.as_os_str().len() <= SOCKET_PATH_BYTES_MAX);
        }
        let domain = Element::parse(&planned.xml).expect("is XML");
        let devices = domain.child("devices").expect("is there");
        for disk in devices.children_named("disk").filter(|disk| disk.attribute("type") == Some("vhostuser")) {
            let queues = disk.child("driver").and_then(|driver| driver.attribute("queues"));
            let queues = queues.map_or(Ok(processors), str::parse).expect("a number");
            prop_assert!((1..=QUEUES_MAX).contains(&queues));
        }
    }
}
