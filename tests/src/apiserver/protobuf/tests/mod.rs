//! Objects in protobuf, compared with bytes by hand and with what an independent decoder finds.

mod answers;
mod decoder;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use self::decoder::{events, numbers, texts, unwrapped, values};
use super::{
    encoder::message as encode,
    enveloped, message,
    table::{Presence, Table, Type, map, optional, repeated, required},
    tables,
};
use crate::apiserver::responses;

const SERVICES: &str = include_str!("../../recordings/services-list.json");
const SLICES: &str = include_str!("../../recordings/endpointslices-list.json");
const NODES: &str = include_str!("../../recordings/node1-list.json");
const SERVICE_CIDRS: &str = include_str!("../../recordings/servicecidrs-list.json");

/// Returns the message of a recorded object.
fn recorded(list: &str, kind: &str, name: &str) -> Result<Vec<u8>> {
    let list: Value = serde_json::from_str(list)?;
    let mut items = list["items"].as_array().context("items")?.iter();
    let mut object = items.find(|item| item["metadata"]["name"] == name).context("the object")?.clone();
    object["kind"] = kind.into();
    message(&object)
}

#[test]
fn a_service_cidr_has_the_bytes_of_the_server() -> Result<()> {
    let object = json!({
        "kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1", "metadata": {"name": "c"},
        "spec": {"cidrs": ["10.0.0.0/8"]},
    });
    // The empty texts, the generation and the creation time of the metadata are written too.
    let metadata = b"\x0a\x01c\x12\0\x1a\0\x22\0\x2a\0\x32\0\x38\0\x42\0";
    let message = [b"\x0a\x11", &metadata[..], b"\x12\x0c\x0a\x0a10.0.0.0/8", b"\x1a\0"].concat();
    assert_eq!(super::message(&object)?, message);
    let type_meta = b"\x0a\x23\x0a\x14networking.k8s.io/v1\x12\x0bServiceCIDR";
    let expected = [b"k8s\0", &type_meta[..], b"\x12\x23", &message, b"\x1a\0\x22\0"].concat();
    assert_eq!(enveloped(&object, &message)?, expected);
    Ok(())
}

#[test]
fn a_service_has_its_fields_at_their_numbers() -> Result<()> {
    let service = recorded(SERVICES, "Service", "lb")?;
    assert_eq!(texts(&service, &[1, 1])?, ["lb"]);
    assert_eq!(texts(&service, &[1, 3])?, ["default"]);
    assert_eq!(texts(&service, &[1, 6])?, ["233"]);
    assert_eq!(texts(&service, &[1, 17, 8])?, ["", "status"], "subresources of the managed fields");
    let fields = texts(&service, &[1, 17, 7, 1])?;
    assert_eq!(fields[1], r#"{"f:status":{"f:loadBalancer":{"f:ingress":{}}}}"#);
    assert_eq!(texts(&service, &[2, 1, 1])?, ["http"]);
    assert_eq!(numbers(&service, &[2, 1, 3])?, [80]);
    assert_eq!(numbers(&service, &[2, 1, 4, 2])?, [80], "targetPort");
    assert_eq!(numbers(&service, &[2, 1, 5])?, [30212]);
    assert_eq!(texts(&service, &[2, 3])?, ["10.96.2.12"]);
    assert_eq!(texts(&service, &[2, 4])?, ["LoadBalancer"]);
    assert_eq!(texts(&service, &[2, 7])?, ["ClientIP"]);
    assert_eq!(texts(&service, &[2, 9])?, ["10.0.0.0/8"]);
    assert_eq!(texts(&service, &[2, 10])?, [""], "an empty externalName is written");
    assert_eq!(numbers(&service, &[2, 14, 1, 1])?, [10800]);
    assert_eq!(numbers(&service, &[2, 20])?, [1]);
    assert_eq!(values(&service, &[2, 21])?, [], "an absent loadBalancerClass is not written");
    assert_eq!(texts(&service, &[3, 1, 1, 1])?, ["198.51.100.20"]);
    assert_eq!(texts(&service, &[3, 1, 1, 3])?, ["VIP"]);
    let dual = recorded(SERVICES, "Service", "dual")?;
    assert_eq!(texts(&dual, &[2, 18])?, ["10.96.9.15", "fd96::15"]);
    assert_eq!(texts(&dual, &[2, 19])?, ["IPv4", "IPv6"]);
    Ok(())
}

#[test]
fn an_endpoint_slice_has_its_fields_at_their_numbers() -> Result<()> {
    let slice = recorded(SLICES, "EndpointSlice", "dual-v6")?;
    assert_eq!(numbers(&slice, &[1, 7])?, [1], "generation");
    assert_eq!(
        texts(&slice, &[1, 11, 1])?,
        ["endpointslice.kubernetes.io/managed-by", "kubernetes.io/service-name"]
    );
    assert_eq!(texts(&slice, &[1, 11, 2])?, ["conformance", "dual"]);
    assert_eq!(texts(&slice, &[2, 1])?, ["fd44:2::11"]);
    assert_eq!(
        [1, 2, 3].map(|field| numbers(&slice, &[2, 2, field]).ok()),
        [1, 1, 0].map(|is| Some(vec![is]))
    );
    assert_eq!(texts(&slice, &[2, 6])?, ["node2"]);
    assert_eq!(texts(&slice, &[3, 1])?, [""]);
    assert_eq!(texts(&slice, &[3, 2])?, ["TCP"]);
    assert_eq!(numbers(&slice, &[3, 3])?, [8080]);
    assert_eq!(texts(&slice, &[4])?, ["IPv6"]);
    Ok(())
}

#[test]
fn a_node_has_its_fields_at_their_numbers() -> Result<()> {
    let node = recorded(NODES, "Node", "node1")?;
    assert_eq!(numbers(&node, &[1, 8, 1])?, [1_795_222_853], "2026-11-21T01:00:53Z");
    assert_eq!(texts(&node, &[2, 1])?, ["10.244.1.0/24"]);
    assert_eq!(texts(&node, &[2, 7])?, ["10.244.1.0/24", "fd44:1::/64"]);
    assert_eq!(texts(&node, &[2, 5, 3])?, ["NoSchedule"]);
    assert_eq!(texts(&node, &[3, 5, 1])?, ["InternalIP", "InternalIP", "Hostname"]);
    assert_eq!(texts(&node, &[3, 5, 2])?, ["192.168.57.11", "fd57::11", "node1"]);
    assert_eq!(numbers(&node, &[3, 6, 1, 1])?, [0], "the port of the kubelet");
    assert_eq!(texts(&node, &[3, 7, 10])?, [""], "architecture");
    Ok(())
}

#[test]
fn a_service_cidr_has_its_fields_at_their_numbers() -> Result<()> {
    let service_cidr = recorded(SERVICE_CIDRS, "ServiceCIDR", "kubernetes")?;
    assert_eq!(texts(&service_cidr, &[2, 1])?, ["10.96.0.0/16", "fd96::/112"]);
    assert_eq!(texts(&service_cidr, &[3, 1, 1])?, ["Ready"]);
    assert_eq!(numbers(&service_cidr, &[3, 1, 4, 1])?, [1_795_222_851]);
    Ok(())
}

#[test]
fn a_list_has_items_without_an_envelope() -> Result<()> {
    let items: [&[u8]; 2] = [b"one", b"two"];
    let list = super::list("v1", "ServiceList", &json!({"resourceVersion": "7"}), items.into_iter())?;
    let message = b"\x0a\x07\x0a\0\x12\x017\x1a\0\x12\x03one\x12\x03two";
    assert_eq!(unwrapped(&list)?, (["v1", "ServiceList"], &message[..]));
    Ok(())
}

#[test]
fn an_event_has_its_length_and_an_object_in_its_envelope() -> Result<()> {
    let object = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {}});
    let object = enveloped(&object, b"m")?;
    assert_eq!(object, b"k8s\0\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x01m\x1a\0\x22\0");
    let event = super::event("ADDED", &object)?;
    // 33 bytes of an event, 24 of the extension, 22 of the object.
    assert_eq!(event, [&b"\0\0\0\x21\x0a\x05ADDED\x12\x18\x0a\x16"[..], &object].concat());
    assert_eq!(events(&event)?, [("ADDED", &*object)]);
    Ok(())
}

#[test]
fn a_status_has_its_details() -> Result<()> {
    let status = responses::too_large(9, 7);
    let body = enveloped(&status, &message(&status)?)?;
    let (type_meta, status) = unwrapped(&body)?;
    assert_eq!(type_meta, ["v1", "Status"]);
    assert_eq!(texts(status, &[2])?, ["Failure"]);
    assert_eq!(texts(status, &[3])?, ["Timeout: Too large resource version: 9, current: 7"]);
    assert_eq!(texts(status, &[4])?, ["Timeout"]);
    assert_eq!(texts(status, &[5, 4, 1])?, ["ResourceVersionTooLarge"]);
    assert_eq!(numbers(status, &[5, 5])?, [1]);
    assert_eq!(numbers(status, &[6])?, [504]);
    Ok(())
}

#[test]
fn each_type_has_its_encoding() -> Result<()> {
    let of = |of: Type, value: Value| encode(&[optional(1, "f", of)], &json!({"f": value}));
    assert_eq!(of(Type::Text, json!("ab"))?, b"\x0a\x02ab");
    assert_eq!(of(Type::Number, json!(300))?, b"\x08\xac\x02");
    assert_eq!(of(Type::Number, json!(-1))?, b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01");
    assert_eq!(of(Type::Flag, json!(true))?, b"\x08\x01");
    assert_eq!(of(Type::Flag, json!(false))?, b"\x08\0");
    assert_eq!(of(Type::Time, json!("1970-01-01T00:00:02.000000003Z"))?, b"\x0a\x04\x08\x02\x10\x03");
    assert_eq!(of(Type::IntOrString, json!(80))?, b"\x0a\x06\x08\0\x10\x50\x1a\0");
    assert_eq!(of(Type::IntOrString, json!("p"))?, b"\x0a\x07\x08\x01\x10\0\x1a\x01p");
    assert_eq!(of(Type::Quantity, json!("4Gi"))?, b"\x0a\x05\x0a\x034Gi");
    assert_eq!(of(Type::RawJson, json!({"f:a": {}}))?, b"\x0a\x0c\x0a\x0a{\"f:a\":{}}");
    Ok(())
}

#[test]
fn lists_and_maps_have_an_entry_for_each_element() -> Result<()> {
    let all = encode(&[repeated(20, "f", Type::Text)], &json!({"f": ["a", "", "b"]}))?;
    assert_eq!(all, b"\xa2\x01\x01a\xa2\x01\0\xa2\x01\x01b");
    let all = encode(&[map(1, "f", Type::Text)], &json!({"f": {"b": "2", "a": ""}}))?;
    assert_eq!(all, b"\x0a\x05\x0a\x01a\x12\0\x0a\x06\x0a\x01b\x12\x012");
    Ok(())
}

#[test]
fn only_required_fields_are_written_without_a_value() -> Result<()> {
    const TABLE: Table = &[
        required(1, "text", Type::Text),
        required(2, "number", Type::Number),
        required(3, "time", Type::Time),
        required(4, "either", Type::IntOrString),
        required(5, "message", Type::Message(&[required(1, "flag", Type::Flag)])),
        optional(6, "optional", Type::Text),
        repeated(7, "list", Type::Text),
        map(8, "map", Type::Text),
    ];
    let expected = b"\x0a\0\x10\0\x1a\0\x22\x06\x08\0\x10\0\x1a\0\x2a\x02\x08\0";
    assert_eq!(encode(TABLE, &json!({}))?, expected);
    let nulls =
        json!({"text": null, "message": null, "optional": null, "list": null, "map": null, "x": null});
    assert_eq!(encode(TABLE, &nulls)?, expected);
    Ok(())
}

#[test]
fn a_field_without_a_row_is_an_error_that_names_it() {
    let object = json!({"kind": "Service", "metadata": {"name": "web"}, "spec": {"ports": [{"prot": 80}]}});
    let error = format!("{:#}", message(&object).unwrap_err());
    assert_eq!(error, "cannot encode the Service \"web\": spec: ports: the table has no field prot");
    assert!(message(&json!({"kind": "Secret", "metadata": {}})).is_err());
    assert!(message(&json!({"kind": "Service", "spec": {"clusterIP": 1}})).is_err());
    assert!(message(&json!({"kind": "Service", "spec": {"ports": {}}})).is_err());
    assert!(message(&json!({"kind": "Service", "spec": {"ports": [{"port": 1.5}]}})).is_err());
    assert!(message(&json!({"kind": "Service", "metadata": {"creationTimestamp": "today"}})).is_err());
}

#[test]
fn a_text_in_place_of_a_number_is_written_as_a_text() -> Result<()> {
    let object = json!({"kind": "Service", "spec": {"ports": [{"port": "eighty"}]}});
    assert_eq!(texts(&message(&object)?, &[2, 1, 3])?, ["eighty"]);
    Ok(())
}

#[test]
fn rows_have_the_order_of_their_numbers() {
    fn check(table: Table) {
        assert!(table.is_sorted_by(|a, b| a.number < b.number || b.presence == Presence::InEnvelope));
        for field in table {
            if let Type::Message(table) = field.value {
                check(table);
            }
        }
    }
    for kind in ["Service", "EndpointSlice", "Node", "ServiceCIDR", "Namespace", "Pod", "Status"] {
        check(tables::of_kind(kind).expect("a table"));
    }
    check(tables::LIST_META);
}
