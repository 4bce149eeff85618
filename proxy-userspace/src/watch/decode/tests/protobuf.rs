//! Decodes objects of protobuf: as JSON of the same objects, and as the API server writes them.

use super::*;

/// Encodes a number of less than 128 or a length.
fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
    bytes
}

/// Encodes a field with text, bytes or a message.
fn field(number: u64, value: impl AsRef<[u8]>) -> Vec<u8> {
    let value = value.as_ref();
    [&*varint(number << 3 | 2), &*varint(value.len() as u64), value].concat()
}

/// Encodes a field with a number.
fn number(number: u64, value: i64) -> Vec<u8> {
    [varint(number << 3), varint(value.cast_unsigned())].concat()
}

/// Encodes an entry of labels or annotations.
fn entry(number: u64, key: &str, value: &str) -> Vec<u8> {
    field(number, [field(1, key), field(2, value)].concat())
}

fn decode_protobuf<K: Kind>(object: &[u8]) -> Result<Decoded<'_, K>, Problem> {
    super::super::decode_protobuf(object, &mut SharedValues::default())
}

/// Decodes an object from JSON, and from the same fields in protobuf.
fn both<K: Kind>(object: &Value) -> [String; 2] {
    let raw = K::Raw::deserialize(object).unwrap().encode();
    let json = decode_json::<K>(&object.to_string(), &mut SharedValues::default()).unwrap();
    [json, decode_protobuf::<K>(&raw).unwrap()].map(|decoded| format!("{decoded:?}"))
}

#[test]
fn recorded_objects_are_decoded_alike() {
    for service in items(SERVICES) {
        let [json, protobuf] = both::<Service>(&service);
        assert_eq!(json, protobuf);
    }
    for slice in items(SLICES) {
        let [json, protobuf] = both::<EndpointSlice>(&slice);
        assert_eq!(json, protobuf);
    }
    for node in items(NODES) {
        let [json, protobuf] = both::<Node>(&node);
        assert_eq!(json, protobuf);
    }
}

#[test]
fn a_service_as_the_server_writes_it_is_decoded() {
    let metadata = [
        field(1, "web"),
        // The server writes empty text too.
        field(2, ""),
        field(3, "shop"),
        field(5, "0f1c"),
        field(6, "4711"),
        number(7, 0),
        entry(11, "app", "web"),
        entry(11, "service.kubernetes.io/service-proxy-name", "other"),
        entry(12, "shunt.dev/balance", "maglev"),
        field(17, field(7, field(1, "{}"))),
    ];
    let target_port = field(4, [number(1, 1), number(2, 0), field(3, "http")].concat());
    let port = [field(1, "http"), field(2, "TCP"), number(3, 80), target_port, number(5, 30_080)];
    let spec = [
        field(1, port.concat()),
        entry(2, "app", "web"),
        field(3, "10.96.0.80"),
        field(4, "NodePort"),
        field(7, "None"),
        field(8, ""),
        number(12, 0),
        number(13, 1),
        field(17, "SingleStack"),
        field(18, "10.96.0.80"),
        field(22, "Local"),
    ];
    let object = [field(1, metadata.concat()), field(2, spec.concat()), field(3, field(1, ""))].concat();
    let decoded = decode_protobuf::<Service>(&object).unwrap();
    assert_eq!(decoded.problems, []);
    assert_eq!((decoded.selected, decoded.resource_version.as_deref()), (false, Some("4711")));
    let expected = json!({
        "metadata": {
            "name": "web", "namespace": "shop",
            "labels": {"service.kubernetes.io/service-proxy-name": "other"},
            "annotations": {"shunt.dev/balance": "maglev"},
        },
        "spec": {
            "type": "NodePort", "clusterIP": "10.96.0.80", "clusterIPs": ["10.96.0.80"],
            "ports": [{"name": "http", "port": 80, "nodePort": 30080}], "internalTrafficPolicy": "Local",
        },
    });
    assert_eq!(decoded.object, Some(good::<Service>(&expected)));
}

#[test]
fn a_slice_as_the_server_writes_it_is_decoded() {
    let metadata = [field(1, "web-1"), field(3, "shop"), entry(11, "kubernetes.io/service-name", "web")];
    let target = [field(1, "Pod"), field(2, "shop"), field(3, "web-0"), field(4, "0f1c")];
    let hints = [field(1, field(1, "zone-a")), field(2, field(1, "node1"))];
    let endpoint = [
        field(1, "10.0.0.1"),
        field(2, [number(1, 0), number(2, 1)].concat()),
        field(4, target.concat()),
        field(6, "node1"),
        field(7, "zone-a"),
        field(8, hints.concat()),
    ];
    let port = [field(1, "http"), field(2, "UDP"), number(3, 8080)];
    let object =
        [field(1, metadata.concat()), field(2, endpoint.concat()), field(3, port.concat()), field(4, "IPv4")];
    let object = object.concat();
    let decoded = decode_protobuf::<EndpointSlice>(&object).unwrap();
    let expected = json!({
        "metadata": {
            "name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4",
        "endpoints": [{
            "addresses": ["10.0.0.1"], "conditions": {"ready": false, "serving": true},
            "targetRef": {"kind": "Pod", "namespace": "shop", "name": "web-0"}, "nodeName": "node1",
            "hints": {"forZones": [{"name": "zone-a"}], "forNodes": [{"name": "node1"}]},
        }],
        "ports": [{"name": "http", "protocol": "UDP", "port": 8080}],
    });
    assert_eq!((decoded.problems, decoded.object), (Vec::new(), Some(good::<EndpointSlice>(&expected))));
}

#[test]
fn a_number_out_of_range_is_named() {
    let spec = field(1, [field(2, "TCP"), number(3, -1)].concat());
    let metadata = [field(1, "web"), field(3, "shop")].concat();
    let object = [field(1, metadata), field(2, spec)].concat();
    let problems = decode_protobuf::<Service>(&object).unwrap().problems;
    let [problem] = &*problems else { panic!("{problems:?}") };
    assert_eq!(problem.to_string(), "spec.ports[0].port: -1 is not a port number, 1 to 65535");
}

#[test]
fn a_field_of_another_type_is_named() {
    let object = field(2, field(1, field(3, "eighty")));
    let problem = decode_protobuf::<Service>(&object).expect_err("a port that is text");
    assert!(problem.to_string().contains("RawServicePort.port"), "{problem}");
    // The metadata can be decoded all the same.
    let metadata = field(1, [field(1, "web"), field(3, "shop"), field(6, "7")].concat());
    let object = [metadata, field(2, field(1, field(3, "eighty")))].concat();
    let metadata = decode_protobuf_metadata(&object).expect("metadata");
    assert_eq!(metadata.written_name().as_deref(), Some("shop/web"));
}

#[test]
fn text_that_is_not_utf_8_is_named() {
    let object = field(1, [field(1, b"\xff"), field(3, "shop")].concat());
    let problem = decode_protobuf::<Service>(&object).expect_err("a name that is no text");
    let expected = "RawService.metadata: RawMetadata.name: text is not UTF-8: ";
    assert!(problem.what.starts_with(expected), "{problem}");
}

#[test]
fn labels_and_annotations_that_are_not_utf_8_count_as_absent() {
    for key in [&b"note"[..], b"\xff", b"shunt.dev/balance"] {
        let annotation = field(12, [field(1, key), field(2, b"\xff")].concat());
        let object = field(1, [field(1, "web"), field(3, "shop"), annotation].concat());
        let decoded = decode_protobuf::<Service>(&object).unwrap();
        assert_eq!((decoded.problems.len(), decoded.object.unwrap().balance), (0, None), "{key:?}");
    }
}

#[test]
fn of_two_entries_with_the_same_key_the_last_counts() {
    let key = "kubernetes.io/service-name";
    let entries = [entry(11, key, "old"), entry(11, "other", "x"), entry(11, key, "web")].concat();
    let object = field(1, [&*field(1, "web-1"), &*field(3, "shop"), &*entries].concat());
    let object = [object, field(4, "IPv4")].concat();
    let slice = decode_protobuf::<EndpointSlice>(&object).unwrap().object.unwrap();
    assert_eq!(slice.service.as_deref(), Some("web"));
}

#[test]
fn a_message_in_parts_is_one_message() {
    let port = field(1, number(3, 80));
    let parts = [
        field(1, field(1, "old")),
        field(2, field(3, "10.96.0.1")),
        field(1, [field(1, "web"), field(3, "shop")].concat()),
        field(2, port),
    ];
    let service = decode_protobuf::<Service>(&parts.concat()).unwrap().object.unwrap();
    assert_eq!(service.name.to_string(), "shop/web");
    assert_eq!((service.cluster_ips.len(), service.ports.len()), (1, 1));
}

#[test]
fn a_field_that_exceeds_its_message_is_refused() {
    for object in [&[0x0a, 5, 0x0a][..], &[0x0a, 2, 0x0a, 9], &[0x0a], &[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]]
    {
        assert!(decode_protobuf::<Service>(object).is_err(), "{object:?}");
    }
}

proptest! {
    #[test]
    fn no_bytes_cause_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode_protobuf::<Service>(&bytes);
        let _ = decode_protobuf::<EndpointSlice>(&bytes);
        let _ = decode_protobuf::<Node>(&bytes);
        let _ = decode_protobuf_metadata(&bytes);
    }
}
